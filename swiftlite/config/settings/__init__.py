"""Parts of the schema: settings that belong together."""
