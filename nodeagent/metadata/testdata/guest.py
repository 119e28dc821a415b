# Reads the metadata in a guest with cloud-init's data sources Ec2 and NoCloud, and prints what they found as JSON.
# Usage: guest.py EMPTY_DIRECTORY URL
import json
import sys

from cloudinit import helpers, settings, util
from cloudinit.distros import fetch
from cloudinit.sources import DataSourceEc2

directory, url = sys.argv[1:]
paths = helpers.Paths({"cloud_dir": directory + "/state", "run_dir": directory + "/run", "templates_dir": directory})
config = dict(settings.CFG_BUILTIN, datasource={"Ec2": {"metadata_urls": [url], "max_wait": 20, "timeout": 5}})

# The test does not run in a machine of EC2.
DataSourceEc2.identify_platform = lambda: DataSourceEc2.CloudNames.AWS
# cloud-init looks up names that do not exist, to find out whether the resolver redirects them. The guest has no resolver,
# and the lookups would wait for one.
util.is_resolvable_url = lambda url: True
ec2 = DataSourceEc2.DataSourceEc2(config, fetch("debian")("debian", config, paths), paths)
assert ec2._get_data(), "cloud-init found no data"


def text(data):
    return data.decode() if isinstance(data, bytes) else data


found = {
    "ec2": {
        "id": ec2.get_instance_id(),
        "keys": ec2.get_public_ssh_keys(),
        "zone": ec2.availability_zone,
        "user_data": text(ec2.userdata_raw),
        "metadata": ec2.metadata,
        "network": DataSourceEc2.convert_ec2_metadata_network_config(
            ec2.metadata["network"],
            fallback_nic="eth0",
            macs_to_nics={mac: "eth%d" % n for n, mac in enumerate(sorted(ec2.metadata["network"]["interfaces"]["macs"]))},
            full_network_config=True,
        ),
    },
}
try:
    seed = util.read_seeded(url + "/nocloud/", timeout=5, retries=0)
    found["nocloud"] = [seed[0], text(seed[1]), text(seed[2])]
except Exception as e:
    found["nocloud"] = str(e)
json.dump(found, sys.stdout, indent=2, sort_keys=True)
print()
