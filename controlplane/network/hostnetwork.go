package network

import (
	"slices"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// hostNetworks has what each host offers to VPCs, at net-host-network/<node>.
var hostNetworks = store.NewTable[cloud.HostNetwork]("net-host-network")

// maxHostNumber is the greatest number of a host: an SPI has 8 bits for the epoch, and 24 for the number.
const maxHostNumber = 1<<24 - 1

// SetHostNetwork stores what a host offers to VPCs. It writes nothing if the stored value is equal. A host that
// encrypts keeps its number, or gets the first number that no other host has. n.Number is ignored.
func SetHostNetwork(tx *store.Tx, node cloud.NodeID, n cloud.HostNetwork) error {
	stored, err := hostNetworks.Get(tx, string(node))
	if err != nil {
		return err
	}
	n.Number = 0
	if stored != nil {
		n.Number = stored.Number
	}
	if n.Encrypt && n.Number == 0 {
		if n.Number, err = freeHostNumber(tx); err != nil {
			return err
		}
	}
	if stored != nil && stored.VTEP == n.VTEP && stored.UnderlayMTU == n.UnderlayMTU &&
		stored.Encrypt == n.Encrypt && stored.Instance == n.Instance && stored.Number == n.Number &&
		slices.Equal(stored.External, n.External) && slices.Equal(stored.Missing, n.Missing) {
		return nil
	}
	hostNetworks.Put(tx, &n, string(node))
	return nil
}

// freeHostNumber returns the first number that no host has.
func freeHostNumber(tx *store.Tx) (uint32, error) {
	all, _, err := hostNetworks.List(tx, 0)
	if err != nil {
		return 0, err
	}
	taken := map[uint32]bool{}
	for _, h := range all {
		taken[h.Value.Number] = true
	}
	for n := uint32(1); n <= maxHostNumber; n++ {
		if !taken[n] {
			return n, nil
		}
	}
	return 0, fault.New(fault.ResourceExhausted, "the cloud has %d hosts that encrypt and can have no more", maxHostNumber)
}

// HostNetworkOf returns what a host offers to VPCs, or nil if its agent has not reported it.
func HostNetworkOf(v store.Reader, node cloud.NodeID) (*cloud.HostNetwork, error) {
	return hostNetworks.Get(v, string(node))
}

// DeleteHostNetwork deletes what a host offered to VPCs. It is called when the host is removed from the cluster.
func DeleteHostNetwork(tx *store.Tx, node cloud.NodeID) { hostNetworks.Delete(tx, string(node)) }

// Limits of the lists of a HostNetwork.
const (
	maxHostTexts = 64  // names of external networks, and things that the host lacks
	maxHostText  = 256 // bytes
	maxInstance  = 64  // bytes
)

// hostNetworkFrom converts the host's description of its network. It returns InvalidArgument if the description exceeds
// a limit or vtep is neither empty nor an IP address.
func hostNetworkFrom(in *agentv1.HostNetwork) (n cloud.HostNetwork, err error) {
	if in == nil {
		return n, fault.Invalid("host", "is required in the first message")
	}
	n = cloud.HostNetwork{
		UnderlayMTU: in.GetUnderlayMtu(), External: in.GetExternalNetworks(), Missing: in.GetMissing(),
		Encrypt: in.GetEncrypt(), Instance: in.GetInstance(),
	}
	if len(n.Instance) > maxInstance {
		return n, fault.Invalid("host.instance", "at most %d bytes, got %d", maxInstance, len(n.Instance))
	}
	for field, texts := range map[string][]string{"host.external_networks": n.External, "host.missing": n.Missing} {
		if len(texts) > maxHostTexts {
			return n, fault.Invalid(field, "at most %d, got %d", maxHostTexts, len(texts))
		}
		for _, t := range texts {
			if len(t) > maxHostText {
				return n, fault.Invalid(field, "at most %d bytes each, got %d", maxHostText, len(t))
			}
		}
	}
	n.VTEP, err = addressOf("host.vtep", in.GetVtep())
	return n, err
}
