"""A cache in the browser: `forebay view` and `fb.view`. Read-only, on this machine, with no request to any other."""
