"""A store's runs over HTTP: health, metrics, JSON, and a live page. Needs the extra `http`."""
