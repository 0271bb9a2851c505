"""The dashboard: a local web page that shows runs while they grow. It needs the extra ``ui``."""
