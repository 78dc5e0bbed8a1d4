"""S3 with rights (moto), and a bucket in another region: what rclone does not judge."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rclone_server import S3Server
from support.fault_proxy import refuse

BUCKET = "bucket"
READ_ONLY = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}],
}
ALL = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
#: Requests by which the users below are made; from the next one on moto looks at rights.
_SET_UP = 7


class ServerWithRights:
    """moto with one bucket, a user ``writer`` who may do everything, and one, ``reader``, who may not write."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("moto_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(_SET_UP)},
        )
        self.endpoint_url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.client("s3", "x", "x").create_bucket(Bucket=BUCKET)
        self.keys = ("x", "x")
        self.writer, self.reader = self.user("writer", ALL), self.user("reader", READ_ONLY)
        self.keys = (self.writer["AWS_ACCESS_KEY_ID"], self.writer["AWS_SECRET_ACCESS_KEY"])
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)

    def client(self, service, key, secret):
        import boto3

        return boto3.session.Session().client(
            service,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name="us-east-1",
        )

    def user(self, name, policy):
        """The environment by which boto3 comes as a new user."""
        iam = self.client("iam", *self.keys)
        iam.create_user(UserName=name)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=json.dumps(policy))
        iam.close()
        return S3Server(self.endpoint_url, key["AccessKeyId"], key["SecretAccessKey"]).env()


def in_region(region, *, told=True):
    """S3's documented answer to a signature for another region than the bucket's; not all servers tell which."""
    wrong = refuse(400, "AuthorizationHeaderMalformed", **({"Region": region} if told else {}))

    def plan(operation, number):
        return act

    def act(exchange):
        signed_for = exchange.headers["Authorization"].partition("Credential=")[2].split("/")[2]
        if signed_for != region:
            wrong(exchange)
            return
        status, headers, body = exchange.forward()
        exchange.answer(status, body, headers)

    return plan
