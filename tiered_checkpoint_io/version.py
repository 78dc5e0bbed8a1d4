"""The release, in a module that every layer can import."""

__version__ = "0.1.0"
