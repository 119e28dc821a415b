package vm

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// knownMetadata and knownLabels are the keys with cloud.ReservedPrefix that callers may set, sorted.
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

// checkKeys returns InvalidArgument if the metadata or labels of a request set a key that begins with
// cloud.ReservedPrefix and is unknown: see cloud.UnknownKey. The VM vm is the one that the request changes, or nil for a
// new VM.
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

// checkReserved implements checkKeys for one field, metadata or labels. present are the pairs that the VM has.
func checkReserved(field string, pairs, present map[string]string, known []string) error {
	key := cloud.UnknownKey(pairs, present, known)
	switch {
	case key == "", field == "metadata" && key == cloud.PendingResize: // checkPolicy refuses PendingResize
		return nil
	case field == "metadata" && slices.Contains(knownLabels, key):
		return fault.Invalid(field, "%s is the key of a label", key)
	case field == "labels" && slices.Contains(knownMetadata, key):
		return fault.Invalid(field, "%s is a key of the metadata", key)
	}
	return fault.Invalid(field, "%s is unknown: the keys that begin with %s are %s", key, cloud.ReservedPrefix, strings.Join(known, ", "))
}
