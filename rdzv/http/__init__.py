"""A store's runs over HTTP: health, metrics, JSON, and a page that follows them. Needs the extra `http`."""
