"""Slow set-up that is the same in all processes: done once, before tests, and before ranks are forked."""

import functools
import gc

import boto3
import botocore.loaders
import botocore.session
import typer.main
import typer.testing


def warm_up():
    """Lets all clients of boto3 read their JSON once, and typer read the commands once.

    Modules that are imported by now are taken out of the garbage collection.
    """
    loader = botocore.loaders.create_loader()

    def share(session):
        session._components.lazy_register_component("data_loader", lambda: loader)

    botocore.session.Session._register_data_loader = share
    boto3.session.Session(aws_access_key_id="x", aws_secret_access_key="x").client("s3", region_name="x").close()
    typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
    gc.freeze()
