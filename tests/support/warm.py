"""What takes long in each process, and is the same in all of them: done once, before tests, and before ranks are forked."""

import gc

import boto3
import botocore.loaders
import botocore.session


def warm_up():
    """Lets all clients of boto3 read their JSON once, and takes what is imported by now out of the garbage collection."""
    loader = botocore.loaders.create_loader()

    def share(session):
        session._components.lazy_register_component("data_loader", lambda: loader)

    botocore.session.Session._register_data_loader = share
    boto3.session.Session(aws_access_key_id="x", aws_secret_access_key="x").client("s3", region_name="x").close()
    gc.freeze()
