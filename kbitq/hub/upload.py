"""Publishing a quantized folder or file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

from kbitq.hub.problems import check_token, explained
from kbitq.hub.repo import Repo

CARD_FILE = "README.md"


@dataclass(frozen=True)
class Pushed:
    """Where it went.

    Attributes:
        url: of the repository's page.
        commit: its id.
        pull_request: its address, if one was opened.
    """

    url: str
    commit: str
    pull_request: str | None = None


def push(
    path: Path,
    repo: Repo,
    *,
    card: str,
    private: bool = False,
    pull_request: bool = False,
    instead: Mapping[str, bytes] | None = None,
) -> Pushed:
    """Upload a folder, or one file, and its model card. The repository is made if there is none.

    An upload that was cut goes on when the same call is made again: files that the Hub has are not sent twice.

    Args:
        path: a folder or a ``.safetensors`` file, complete (``kbitq verify``).
        repo: where to; its revision is the branch.
        card: text of the model card, which takes the place of a README.md in ``path``.
        private: make a new repository private.
        pull_request: open a pull request instead of committing to the branch.
        instead: content of further files, by name, in place of what ``path`` may have under these names.

    Raises:
        HubError: there is no token that could be sent; the Hub refused or could not be reached.
    """
    check_token(needed=True)
    api = HfApi()
    message = f"Upload {path.name}, quantized with kbitq"
    with explained(str(repo)):
        page = api.create_repo(repo.id, private=private, exist_ok=True)
        if repo.revision and not pull_request:
            api.create_branch(repo.id, branch=repo.revision, exist_ok=True)
        if path.is_dir():
            done = api.upload_folder(
                repo_id=repo.id,
                folder_path=path,
                revision=repo.revision,
                create_pr=pull_request,
                commit_message=message,
                ignore_patterns=[CARD_FILE, *(instead or ())],
            )
        else:
            done = api.upload_file(
                path_or_fileobj=path,
                path_in_repo=path.name,
                repo_id=repo.id,
                revision=repo.revision,
                create_pr=pull_request,
                commit_message=message,
            )
        # Last, so that a page never praises what is not there; into the same pull request.
        last = api.create_commit(
            repo_id=repo.id,
            operations=[
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=data)
                for name, data in {**(instead or {}), CARD_FILE: card.encode()}.items()
            ],
            revision=done.pr_revision if pull_request else repo.revision,
            commit_message="Model card",
        )
    return Pushed(str(page), last.oid, done.pr_url if pull_request else None)
