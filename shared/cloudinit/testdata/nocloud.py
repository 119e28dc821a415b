# Reads a directory with the files of a seed as cloud-init does at boot, and prints what cloud-init found as JSON.
# Usage: nocloud.py DIRECTORY
import json
import sys

from cloudinit import helpers, settings
from cloudinit.distros import fetch
from cloudinit.sources import DataSourceNoCloud

directory = sys.argv[1]
paths = helpers.Paths({"cloud_dir": directory + "/state", "run_dir": directory + "/run", "templates_dir": directory})
config = dict(settings.CFG_BUILTIN, datasource={"NoCloud": {"fs_label": None}})
source = DataSourceNoCloud.DataSourceNoCloud(config, fetch("debian")("debian", config, paths), paths)
source.seed_dirs = [directory]
assert source._get_data(), "cloud-init found no data"


def text(data):
    return data.decode() if isinstance(data, bytes) else data


json.dump(
    {
        "id": source.get_instance_id(),
        "host_name": source.metadata.get("local-hostname"),
        "keys": source.get_public_ssh_keys(),
        "user_data": text(source.userdata_raw),
        "vendor_data": text(source.vendordata_raw or ""),
        "network": source.network_config,
    },
    sys.stdout,
)
