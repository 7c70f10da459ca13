"""The release, in the one place where it is written.

The package's metadata, `prfaas --version` and the OpenAPI document take it from here.
"""

VERSION = "0.1.0"
