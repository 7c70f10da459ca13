"""What one client may take of the HTTP front: the section `http` of the configuration."""

from prfaas.config import HttpConfig

Limits = HttpConfig
