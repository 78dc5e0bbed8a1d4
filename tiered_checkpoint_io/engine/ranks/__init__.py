"""How ranks communicate."""
