package vm

import (
	"maps"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// reservedPrefix is the prefix of the keys of metadata and labels that Trivet defines. All other keys belong to the
// users.
const reservedPrefix = "trivet/"

// knownMetadata and knownLabels are the keys with reservedPrefix that callers may set, sorted.
var (
	knownMetadata = []string{
		cloud.CDROMKey, cloud.CPUPolicyKey, cloud.FirmwareKey, cloud.GuestExec, cloud.HighAvailability, cloud.HAPriority,
		cloud.InstanceTypeKey,
		cloud.MetadataTokens, cloud.OSTypeKey, cloud.RescueKey, cloud.RestartPolicy, cloud.RTCKey, SSHKeys, UserData,
	}
	knownLabels = []string{
		cloud.AffinityLabel, cloud.AffinitySoftLabel, cloud.AntiAffinityLabel, cloud.AntiAffinitySoftLabel,
		cloud.NodeSelectorLabel, cloud.SpreadLabel, cloud.SpreadGroupLabel,
	}
)

// checkKeys returns InvalidArgument if the metadata or labels of a request set a key that begins with reservedPrefix and
// is unknown: a key with a typing error would otherwise have no effect, which the caller would not notice. The VM vm is
// the one that the request changes, or nil for a new VM. Unknown keys that it has already, for example from another
// version, can be changed, and keys with an empty value, which removes them, are accepted.
func checkKeys(metadata, labels map[string]string, vm *cloud.VM) error {
	var has, labelled map[string]string
	if vm != nil {
		has, labelled = vm.Metadata, vm.Labels
	}
	if err := checkReserved("metadata", metadata, has, knownMetadata); err != nil {
		return err
	}
	return checkReserved("labels", labels, labelled, knownLabels)
}

// checkReserved implements checkKeys for one field, metadata or labels. The parameter has has the present pairs.
func checkReserved(field string, pairs, has map[string]string, known []string) error {
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		if !strings.HasPrefix(key, reservedPrefix) || pairs[key] == "" || slices.Contains(known, key) {
			continue
		}
		if _, present := has[key]; present || field == "metadata" && key == cloud.PendingResize { // checkPolicy refuses it
			continue
		}
		switch {
		case field == "metadata" && slices.Contains(knownLabels, key):
			return fault.Invalid(field, "%s is the key of a label", key)
		case field == "labels" && slices.Contains(knownMetadata, key):
			return fault.Invalid(field, "%s is a key of the metadata", key)
		}
		return fault.Invalid(field, "%s is unknown: the keys that begin with %s are %s", key, reservedPrefix, strings.Join(known, ", "))
	}
	return nil
}
