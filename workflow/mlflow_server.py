"""`make mlflow-server`: start a tracking server, by default for this machine only and without a password.

Environment variables: MLFLOW_HOST (127.0.0.1), MLFLOW_PORT (5000), MLFLOW_PASSWORD (none), MLFLOW_BACKEND (URI of a database;
sqlite:///mlflow.db) and MLFLOW_SERVER_ALLOWED_HOSTS.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ARTIFACTS = Path("mlruns/server")
AUTH = Path("mlruns/auth.ini")  # has the password; auth.db beside it has the permissions; only their owner may read them
USER = "admin"
PRIVATE = "localhost localhost:* 127.* 10.* 192.168.* 172.1[6-9].* 172.2[0-9].* 172.3[01].*"


def main() -> None:
    """Print how to use the server, and start it in place of this process."""
    setting = os.environ.get
    host, port = setting("MLFLOW_HOST") or "127.0.0.1", setting("MLFLOW_PORT") or "5000"
    backend, password = setting("MLFLOW_BACKEND") or "sqlite:///mlflow.db", setting("MLFLOW_PASSWORD")
    here = host in {"127.0.0.1", "localhost"}
    full = socket.gethostname()
    name = full.partition(".")[0]
    allowed = setting("MLFLOW_SERVER_ALLOWED_HOSTS") or ",".join([name, f"{name}:*", f"{name}.*", *PRIVATE.split()])
    if backend.startswith("postgresql"):
        need("psycopg2", "psycopg2-binary>=2.9")
    uri = f"http://{'127.0.0.1' if here else full}:{port}"
    print(f"To send runs to this server: export MLFLOW_TRACKING_URI={uri}")
    if password:
        need("flask_wtf", "Flask-WTF<2")
        with_password(password)
        print(f"and: export MLFLOW_TRACKING_USERNAME={USER} MLFLOW_TRACKING_PASSWORD=... (the password)")
    else:
        print(f"No password is set (MLFLOW_PASSWORD): anybody who reaches port {port} can read, change and delete all runs.")
    others = f"requests for the host names {allowed} (MLFLOW_SERVER_ALLOWED_HOSTS)"
    reached = "this machine only; MLFLOW_HOST=0.0.0.0 serves others" if here else others
    print(f"It answers {reached}.", flush=True)
    # A password in the database's address must not be among the arguments, which all users of the machine see.
    os.environ |= {"MLFLOW_BACKEND_STORE_URI": backend, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = ["mlflow", "server", "--host", host, "--port", port, "--allowed-hosts", allowed]
    command += ["--artifacts-destination", str(ARTIFACTS.absolute()), *(["--app-name", "basic-auth"] if password else [])]
    os.execvp("mlflow", command)


def with_password(password: str) -> None:
    """Configure MLflow's basic authentication with one user and this password."""
    if len(password) < 12:
        sys.exit("error: MLFLOW_PASSWORD: too short, as MLflow needs 12 characters. Set a longer one.")
    users = AUTH.with_suffix(".db").absolute()
    users.parent.mkdir(exist_ok=True)
    users.unlink(missing_ok=True)  # otherwise the password of an earlier start stays valid
    AUTH.unlink(missing_ok=True)
    for private in (AUTH, users):
        private.touch(mode=0o600)
    AUTH.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{users}\nadmin_username = {USER}\n"
        f"admin_password = {password.replace('%', '%%')}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    os.environ["MLFLOW_AUTH_CONFIG_PATH"] = str(AUTH.absolute())
    os.environ.setdefault("MLFLOW_FLASK_SERVER_SECRET_KEY", secrets.token_hex(32))


def need(module: str, requirement: str) -> None:
    """Install a package that only some servers need, if it is missing."""
    if find_spec(module) is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
        subprocess.run([*pip, requirement], check=True)


if __name__ == "__main__":
    main()
