package qemu

import (
	"fmt"
	"os"
	"regexp"
	"slices"
)

// Model is the device model of a network interface.
type Model string

const (
	VirtioNet Model = "virtio-net" // virtio-net-pci
	E1000     Model = "e1000"      // Intel 82540EM, for guests without a virtio driver
)

// MaxNICs is the maximum number of network interfaces of a VM. The API of the control plane has the same limit.
const MaxNICs = 8

// spareNICPorts is the number of free PCIe root ports that a VM has for network interfaces that are attached later.
const spareNICPorts = 4

// Limits of an interface's MTU. QEMU refuses a smaller or larger value of host_mtu.
const (
	minMTU = 68
	maxMTU = 65535
)

// validMAC matches a unicast address: the lowest bit of the first byte is 0.
var validMAC = regexp.MustCompile(`^[0-9a-f][02468ace](:[0-9a-f]{2}){5}$`)

// NIC is one network interface of a VM. Its packets go to and from a tap of the host.
type NIC struct {
	ID    string `json:"id"` // unique in the VM, like the id of a disk
	Model Model  `json:"model"`
	MAC   string `json:"mac"` // in the notation 02:00:5e:10:00:01
	// MTU is the largest packet in bytes. A virtio driver of the guest learns it from the device; 0 leaves it to the
	// guest.
	MTU  int `json:"mtu"`
	Slot int `json:"slot"` // number of its PCIe root port, 0 to 7; -1 means that KeepSlots chooses it
	// Port is the caller's name of the tap. QEMU does not get it. It is stored so that a later agent can release the
	// tap.
	Port string `json:"port"`
}

func (n NIC) validate() error {
	switch {
	case !validDisk.MatchString(n.ID):
		return invalid("network interface: %q is not a valid id", n.ID)
	case n.Model != VirtioNet && n.Model != E1000:
		return invalid("network interface %s: the model %q is not known", n.ID, n.Model)
	case !validMAC.MatchString(n.MAC):
		return invalid("network interface %s: %q is not a unicast MAC address", n.ID, n.MAC)
	case n.MTU != 0 && (n.MTU < minMTU || n.MTU > maxMTU):
		return invalid("network interface %s: an MTU of %d is not within %d to %d", n.ID, n.MTU, minMTU, maxMTU)
	case n.Slot < 0 || n.Slot >= MaxNICs:
		return invalid("network interface %s: the slot %d is not within 0 to %d", n.ID, n.Slot, MaxNICs-1)
	}
	return nil
}

func validateNICs(nics []NIC) error {
	if len(nics) > MaxNICs {
		return invalid("%d network interfaces are more than %d", len(nics), MaxNICs)
	}
	ids, taken, macs := map[string]bool{}, map[int]bool{}, map[string]bool{}
	for _, n := range nics {
		if err := n.validate(); err != nil {
			return err
		}
		if ids[n.ID] || taken[n.Slot] || macs[n.MAC] {
			return invalid("network interface %q has the id, the slot or the MAC address of another interface", n.ID)
		}
		ids[n.ID], taken[n.Slot], macs[n.MAC] = true, true, true
	}
	return nil
}

// keepNICSlots returns nics with a slot for each interface, like [Spec.KeepSlots] for disks. An interface keeps its
// slot if its model changes, because all models are attached to the same root ports.
func keepNICSlots(nics, before []NIC) ([]NIC, error) {
	nics = slices.Clone(nics)
	taken := map[int]bool{}
	for i, n := range nics {
		if at := slices.IndexFunc(before, func(b NIC) bool { return b.ID == n.ID }); n.Slot == -1 && at >= 0 {
			nics[i].Slot = before[at].Slot
		}
		taken[nics[i].Slot] = true
	}
	for i := range nics {
		if nics[i].Slot != -1 {
			continue
		}
		if nics[i].Slot = freeSlot(taken, MaxNICs); nics[i].Slot < 0 {
			return nil, invalid("network interface %s: a VM can have at most %d", nics[i].ID, MaxNICs)
		}
		taken[nics[i].Slot] = true
	}
	return nics, nil
}

// freeSlot returns the lowest slot below n that is not in taken, or -1.
func freeSlot(taken map[int]bool, n int) int {
	for slot := range n {
		if !taken[slot] {
			return slot
		}
	}
	return -1
}

// nicPorts returns the number of root ports for network interfaces with which a VM is started.
func (s Spec) nicPorts() int {
	last := -1
	for _, n := range s.NICs {
		last = max(last, n.Slot)
	}
	if s.NICPorts > 0 {
		return max(s.NICPorts, last+1)
	}
	return min(last+1+spareNICPorts, MaxNICs)
}

func nicPortID(slot int) string { return fmt.Sprintf("nicport%d", slot) }

// Names of an interface's device and backend in QEMU.
func (n NIC) deviceID() string { return nicPrefix + n.ID }
func (n NIC) netdevID() string { return "net-" + n.ID }

const nicPrefix = "nic-"

// device returns the -device argument of an interface, which is also that of device_add. Option ROMs are for booting
// from the network, which VMs do not, so the interface has none, and no place in the boot order.
func (n NIC) device() object {
	o := object{
		"id": n.deviceID(), "netdev": n.netdevID(), "mac": n.MAC, "bus": nicPortID(n.Slot), "addr": "0x0", "romfile": "",
	}
	switch n.Model {
	case VirtioNet:
		o["driver"], o["mq"] = "virtio-net-pci", false
		if n.MTU != 0 {
			o["host_mtu"] = n.MTU
		}
	case E1000:
		o["driver"] = "e1000"
	}
	return o
}

// nics adds the network interfaces. The parameter fd is the descriptor of the first interface's tap.
func (a *args) nics(s Spec, fd int) {
	for i, n := range s.NICs {
		a.add("-netdev", fmt.Sprintf("tap,id=%s,fd=%d,vhost=off", n.netdevID(), fd+i))
		a.json("-device", n.device())
	}
}

// tapsInOrder returns the taps of all network interfaces in the order of s.NICs. It returns an error if a tap is
// missing.
func (f Files) tapsInOrder(s Spec) ([]*os.File, error) {
	var out []*os.File
	for _, n := range s.NICs {
		tap := f.Taps[n.ID]
		if tap == nil {
			return nil, fmt.Errorf("network interface %s has no tap", n.ID)
		}
		if err := checkOpenMode(tap, true); err != nil {
			return nil, fmt.Errorf("the tap of network interface %s %w", n.ID, err)
		}
		out = append(out, tap)
	}
	return out, nil
}
