// Package cloudinit renders what cloud-init needs in a guest at its first boot: the files of cloud-init's NoCloud data
// source, and a disk image with these files (a seed).
//
// An [Instance] describes the guest. [Render] checks the description and returns the [Files] meta-data, user-data,
// vendor-data and network-config. [Seed] returns a disk image with these files, which the guest's machine gets as an
// additional read-only disk. [NICs] derives the interfaces of an Instance from virtual network ports. The metadata
// server of package metadata serves the same files over HTTP.
//
// # Decisions
//
//   - All functions are pure, and equal input gives equal bytes. The agent can therefore compare a seed with the image
//     on the host, and rewrite the image only if the description changed.
//   - A seed is a FAT12 file system of 1 MiB without a partition table, and has the label cidata. cloud-init searches
//     all block devices for a vfat or iso9660 file system with this label. FAT was chosen because the library writes it
//     directly to memory with times that we set. For ISO 9660, the libraries that we tried (go-diskfs v1.9.4,
//     kdomanski/iso9660 v0.4.0) copy the files to a temporary directory, which would put secrets of the user data on
//     the host's disk, and write the current time to the image.
//   - network-config has version 2 of cloud-init's format. Every interface is found by its MAC address, because the
//     kernel's names depend on the guest's distribution. The interfaces are renamed to eth0, eth1 and so on in the
//     order of [Instance.NICs]: without a new name, some versions of cloud-init take the name of the entry for the
//     kernel's name unless the image uses netplan.
//   - Default routes are written as the keys gateway4 and gateway6, although netplan declares them deprecated:
//     cloud-init 22.4 (Debian 12) changes a route to ::/0 into a route to ::/64 unless the image uses netplan, and
//     rejects the destination "default". The keys have no metric, so that only one interface may have a gateway of each
//     family. Default routes from DHCP get metrics.
//   - With DHCPv6, network-config also has accept-ra, because DHCPv6 has no routes: without the key, the files that
//     cloud-init writes for Fedora turn router advertisements off. The default routes of several interfaces from router
//     advertisements have no metrics: netplan before 1.0 rejects the key for them.
//   - User data is checked only where cloud-init would ignore the whole text after a mistake and report the mistake
//     nowhere but in the guest's log: see [CheckUserData]. It is never changed.
//
// The package imports no other package of Trivet: an Instance consists of values that the caller takes from its own
// types. The package does not know how guests are started or how they reach the host.
package cloudinit

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"

	"go.yaml.in/yaml/v3"
)

// Limits of an Instance. MaxUserData also limits VendorData. MaxSSHKeys is the total length of all keys. Together they
// ensure that the files fit into a seed.
const (
	MaxUserData = 64 << 10 // bytes
	MaxSSHKeys  = 64 << 10 // bytes
	MaxNICs     = 32
	MaxPerNIC   = 64 // addresses, routes, resolvers and search domains, each
)

// Instance describes a guest.
type Instance struct {
	// ID is cloud-init's instance-id: 1 to 128 letters, digits and the characters "-", "." and "_". cloud-init runs the
	// steps of a first boot again if the ID differs from that of the previous boot, for example after a VM was made
	// from another VM's disk.
	ID string
	// HostName is a DNS name of one or more labels. If it is empty, the guest keeps the name in its image.
	HostName string
	// SSHKeys are lines in the format of authorized_keys, for the image's default user.
	SSHKeys []string
	// UserData is the text of the guest's owner: a script, cloud-config, or another format of cloud-init. It may be
	// empty.
	UserData []byte
	// VendorData has the formats of UserData. cloud-init executes it before UserData, which can override it. It may be
	// empty.
	VendorData []byte
	// NICs are the guest's network interfaces in the order of their device numbers.
	NICs []NIC
}

// NIC describes a network interface of a guest.
type NIC struct {
	// MAC is the Ethernet address by which the guest finds the interface. It is unique in the Instance.
	MAC net.HardwareAddr
	// MTU is in bytes. 0 leaves the MTU to DHCP and the kernel.
	MTU uint16
	// DHCP4 and DHCP6 enable the guest's DHCP clients, and DHCP6 also router advertisements. Static addresses may be set
	// in addition.
	DHCP4, DHCP6 bool
	// Addresses are static addresses, each with the length of its subnet's prefix.
	Addresses []netip.Prefix
	// Gateway4 and Gateway6 are the next hops of the default routes, or invalid without such a route. Each must be in
	// the subnet of one of Addresses. Only one NIC of an Instance may have a Gateway4, and only one a Gateway6.
	Gateway4, Gateway6 netip.Addr
	// Routes are further static routes.
	Routes []Route
	// DNS are the resolvers, and Search are the domains in which the guest looks up short names.
	DNS    []netip.Addr
	Search []string
}

// Route is a static route.
type Route struct {
	To  netip.Prefix // not a default route
	Via netip.Addr   // of the same address family as To
}

// Files are the contents of the files of cloud-init's NoCloud data source.
type Files struct {
	MetaData, UserData, VendorData, NetworkConfig []byte
}

// Names of the files in a seed, and of the last elements of their URLs.
const (
	MetaDataFile      = "meta-data"
	UserDataFile      = "user-data"
	VendorDataFile    = "vendor-data"
	NetworkConfigFile = "network-config"
)

// ByName returns the contents of the file with one of the four names. ok is false for any other name.
func (f *Files) ByName(name string) (content []byte, ok bool) {
	for _, file := range f.list() {
		if file.name == name {
			return file.content, true
		}
	}
	return nil, false
}

// namedFile is a file of a seed.
type namedFile struct {
	name    string
	content []byte
}

// list returns the files in the order in which they are stored in a seed.
func (f *Files) list() []namedFile {
	return []namedFile{
		{MetaDataFile, f.MetaData},
		{UserDataFile, f.UserData},
		{VendorDataFile, f.VendorData},
		{NetworkConfigFile, f.NetworkConfig},
	}
}

// Render returns the files for an instance. It returns an error that names the wrong field if the description exceeds a
// limit or contains something that cloud-init would not accept.
func Render(i *Instance) (*Files, error) {
	if err := i.check(); err != nil {
		return nil, fmt.Errorf("render cloud-init files of instance %q: %w", i.ID, err)
	}
	metaData, err := encode(metaData{InstanceID: i.ID, LocalHostName: i.HostName, PublicKeys: i.SSHKeys})
	if err != nil {
		return nil, fmt.Errorf("render %s: %w", MetaDataFile, err)
	}
	network, err := encode(newNetworkConfig(i.NICs))
	if err != nil {
		return nil, fmt.Errorf("render %s: %w", NetworkConfigFile, err)
	}
	return &Files{
		MetaData: metaData, NetworkConfig: network,
		UserData: bytes.Clone(i.UserData), VendorData: bytes.Clone(i.VendorData),
	}, nil
}

// metaData is the file meta-data. The names are those of cloud-init's documentation of NoCloud.
type metaData struct {
	InstanceID    string   `yaml:"instance-id"`
	LocalHostName string   `yaml:"local-hostname,omitempty"`
	PublicKeys    []string `yaml:"public-keys,omitempty"`
}

// encode returns v as YAML with the indentation that is usual for cloud-init's files.
func encode(v any) ([]byte, error) {
	var out bytes.Buffer
	e := yaml.NewEncoder(&out)
	e.SetIndent(2)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	if err := e.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
