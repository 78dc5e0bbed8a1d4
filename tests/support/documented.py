"""What a command prints with ``--json``, by the schema that ``schema`` prints."""

import json

import jsonschema

from tiered_checkpoint_io.cli.schema import schema_of


def document_of(command, done):
    """The one document that a command printed, which is as the schema has it."""
    (line,) = done.stdout.splitlines()
    return check(command, json.loads(line))


def check(command, document):
    """The document, which is one of that command's."""
    schema = schema_of(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(exactly(schema), format_checker=formats).validate(document)
    return document


def exactly(schema):
    """The same schema, for documents without further keys: a key that the schema does not tell of fails the test."""
    if isinstance(schema, dict):
        closed = {key: exactly(value) for key, value in schema.items()}
        return {**closed, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else closed
    return [exactly(each) for each in schema] if isinstance(schema, list) else schema
