package cloudinit

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// instanceText is the form in which the scripts in testdata write an Instance.
type instanceText struct {
	ID       string   `yaml:"id"`
	HostName string   `yaml:"host_name"`
	SSHKeys  []string `yaml:"ssh_keys"`
	UserData string   `yaml:"user_data"`
	Vendor   string   `yaml:"vendor_data"`
	NICs     []struct {
		MAC          string         `yaml:"mac"`
		MTU          uint16         `yaml:"mtu"`
		DHCP4, DHCP6 bool           `yaml:",omitempty"`
		Addresses    []netip.Prefix `yaml:"addresses"`
		Gateway4     netip.Addr     `yaml:"gateway4"`
		Gateway6     netip.Addr     `yaml:"gateway6"`
		DNS          []netip.Addr   `yaml:"dns"`
		Search       []string       `yaml:"search"`
		Routes       []struct {
			To  netip.Prefix `yaml:"to"`
			Via netip.Addr   `yaml:"via"`
		} `yaml:"routes"`
	} `yaml:"nics"`
}

// parseInstance returns the instance that text describes in YAML.
func parseInstance(t *testing.T, text string) *Instance {
	t.Helper()
	var in instanceText
	d := yaml.NewDecoder(strings.NewReader(text))
	d.KnownFields(true)
	require.NoError(t, d.Decode(&in))
	out := &Instance{ID: in.ID, HostName: in.HostName, SSHKeys: in.SSHKeys, UserData: []byte(in.UserData), VendorData: []byte(in.Vendor)}
	for _, n := range in.NICs {
		mac, err := net.ParseMAC(n.MAC)
		require.NoError(t, err)
		nic := NIC{
			MAC: mac, MTU: n.MTU, DHCP4: n.DHCP4, DHCP6: n.DHCP6, Addresses: n.Addresses,
			Gateway4: n.Gateway4, Gateway6: n.Gateway6, DNS: n.DNS, Search: n.Search,
		}
		for _, r := range n.Routes {
			nic.Routes = append(nic.Routes, Route(r))
		}
		out.NICs = append(out.NICs, nic)
	}
	return out
}

// TestNICs compares network-config with testdata/ports. The input is a list of ports.
func TestNICs(t *testing.T) {
	datadriven.RunTest(t, "testdata/ports", func(t *testing.T, d *datadriven.TestData) string {
		var in []struct {
			MAC       string         `yaml:"mac"`
			MTU       uint16         `yaml:"mtu"`
			DHCP      bool           `yaml:"dhcp"`
			Addresses []netip.Prefix `yaml:"addresses"`
			Gateways  []netip.Addr   `yaml:"gateways"`
			DNS       []netip.Addr   `yaml:"dns"`
			Search    []string       `yaml:"search"`
		}
		decoder := yaml.NewDecoder(strings.NewReader(d.Input))
		decoder.KnownFields(true)
		require.NoError(t, decoder.Decode(&in))
		var ports []Port
		for _, p := range in {
			mac, err := net.ParseMAC(p.MAC)
			require.NoError(t, err)
			ports = append(ports, Port{mac, p.MTU, p.DHCP, p.Addresses, p.Gateways, p.DNS, p.Search})
		}
		files, err := Render(&Instance{ID: "i", NICs: NICs(ports)})
		require.NoError(t, err)
		return string(files.NetworkConfig)
	})
}

// TestRender compares the rendered files with testdata/render. The command render prints all files.
func TestRender(t *testing.T) {
	datadriven.RunTest(t, "testdata/render", func(t *testing.T, d *datadriven.TestData) string {
		require.Equal(t, "render", d.Cmd)
		instance := parseInstance(t, d.Input)
		files, err := Render(instance)
		if err != nil {
			return err.Error() + "\n"
		}
		require.Equal(t, instance.UserData, files.UserData, "user data is not changed")
		again, err := Render(instance)
		require.NoError(t, err)
		require.Equal(t, files, again)
		var out strings.Builder
		for _, f := range files.list() {
			content, ok := files.ByName(f.name)
			require.True(t, ok)
			fmt.Fprintf(&out, "== %s\n%s", f.name, content)
		}
		return out.String()
	})
}

func TestByNameRefusesOtherNames(t *testing.T) {
	files, err := Render(&Instance{ID: "i"})
	require.NoError(t, err)
	for _, name := range []string{"", "meta-data/", "../user-data", "Meta-Data"} {
		_, ok := files.ByName(name)
		require.False(t, ok, name)
	}
}
