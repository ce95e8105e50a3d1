"""The Hugging Face Hub: reading a repository as a checkpoint, and publishing one. The only importer of huggingface_hub.

Everything goes through ``huggingface_hub``'s own client, so its settings hold: HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE, HF_HUB_DISABLE_XET.
"""

from kbitq.hub.problems import check_token
from kbitq.hub.remote import HubStorage, download
from kbitq.hub.repo import Repo, parse_repo
from kbitq.hub.upload import Pushed, push

__all__ = ["HubStorage", "Pushed", "Repo", "check_token", "download", "parse_repo", "push"]
