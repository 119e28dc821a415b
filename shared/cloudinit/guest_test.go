package cloudinit

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/trivet-cloud/trivet/shared/testenv"
)

// systemPython is the interpreter for which Debian installs cloud-init's modules.
const systemPython = "/usr/bin/python3"

const twoNICs = `
id: vm-1
host_name: web.example.org
ssh_keys:
- ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAICTOlZZ+XO9BvI2oR4o5aTRbdRqZQNsG1jvdR2MJSSPo alice@example.com
user_data: "#!/bin/sh\n"
vendor_data: "#cloud-config\n{}\n"
nics:
- {mac: "02:00:00:00:00:01", dhcp4: true, dhcp6: true, mtu: 1450}
- mac: "02:00:00:00:00:02"
  mtu: 1400
  addresses: [10.0.0.5/20, "fd12:3456:789a::5/64"]
  gateway4: 10.0.0.1
  gateway6: "fd12:3456:789a::1"
  dns: [10.0.0.53]
  search: [project.internal]
  routes: [{to: 10.99.0.0/16, via: 10.0.0.9}]
`

// TestCloudInitReadsSeed copies the files from seeds, and reads them with cloud-init's data source NoCloud.
func TestCloudInitReadsSeed(t *testing.T) {
	testenv.Program(t, "cloud-init")
	type found struct {
		ID         string         `json:"id"`
		HostName   string         `json:"host_name"`
		Keys       []string       `json:"keys"`
		UserData   string         `json:"user_data"`
		VendorData string         `json:"vendor_data"`
		Network    map[string]any `json:"network"`
	}
	read := func(i *Instance) (f found) {
		image, _ := writeSeed(t, i)
		directory := t.TempDir()
		output(t, "mcopy", "-s", "-i", image, "::/*", directory)
		require.NoError(t, json.Unmarshal([]byte(output(t, systemPython, "testdata/nocloud.py", directory)), &f))
		return f
	}

	f := read(parseInstance(t, twoNICs))
	require.Len(t, f.Network["ethernets"], 2)
	f.Network = nil
	require.Equal(t, found{ID: "vm-1", HostName: "web.example.org", Keys: []string{ed25519Key}, UserData: "#!/bin/sh\n",
		VendorData: "#cloud-config\n{}\n"}, f)

	f = read(&Instance{ID: "vm-2"})
	require.Equal(t, "vm-2", f.ID)
	require.Empty(t, f.Keys)
}

// TestCloudInitConvertsNetworkConfig converts network-config with cloud-init for three groups of distributions, which
// write the configuration in different ways, and checks values in the results.
func TestCloudInitConvertsNetworkConfig(t *testing.T) {
	testenv.Program(t, "cloud-init")
	files, err := Render(parseInstance(t, twoNICs))
	require.NoError(t, err)
	config := filepath.Join(t.TempDir(), "network-config")
	require.NoError(t, os.WriteFile(config, files.NetworkConfig, 0o600))
	convert := func(distribution, kind string) string {
		directory := t.TempDir()
		output(t, "cloud-init", "devel", "net-convert", "-p", config, "-k", "yaml", "-d", directory, "-D", distribution, "-O", kind,
			"-m", "eth0,02:00:00:00:00:01", "-m", "eth1,02:00:00:00:00:02")
		return directory
	}
	text := func(path ...string) string {
		content, err := os.ReadFile(filepath.Join(path...))
		require.NoError(t, err)
		return string(content)
	}

	var netplan, written any
	require.NoError(t, yaml.Unmarshal([]byte(text(convert("ubuntu", "netplan"), "etc/netplan/50-cloud-init.yaml")), &netplan))
	require.NoError(t, yaml.Unmarshal(files.NetworkConfig, &written))
	require.Equal(t, map[string]any{"network": written}, netplan, "cloud-init passes version 2 to netplan without a change")

	eni := text(convert("debian", "eni"), "etc/network/interfaces.d/50-cloud-init")
	for _, line := range []string{"iface eth0 inet dhcp", "iface eth0 inet6 dhcp", "accept_ra 1", "iface eth1 inet static", "address 10.0.0.5/20", "mtu 1400",
		"gateway 10.0.0.1", "iface eth1 inet6 static", "address fd12:3456:789a::5/64", "gateway fd12:3456:789a::1",
		"dns-nameservers 10.0.0.53", "post-up route add -net 10.99.0.0/16 gw 10.0.0.9"} {
		require.Contains(t, eni, line)
	}

	directory := filepath.Join(convert("fedora", "sysconfig"), "etc/sysconfig/network-scripts")
	for _, line := range []string{"BOOTPROTO=dhcp\n", "DHCPV6C=yes\n", "IPV6_FORCE_ACCEPT_RA=yes\n"} {
		require.Contains(t, text(directory, "ifcfg-eth0"), line)
	}
	for _, line := range []string{"HWADDR=02:00:00:00:00:02", "IPADDR=10.0.0.5", "NETMASK=255.255.240.0", "GATEWAY=10.0.0.1",
		"IPV6ADDR=fd12:3456:789a::5/64", "IPV6_DEFAULTGW=fd12:3456:789a::1", "MTU=1400"} {
		require.Contains(t, text(directory, "ifcfg-eth1"), line)
	}
}

// TestCloudInitAgreesWithCheckUserData compares the verdicts of CheckUserData and cloud-init about cloud-config.
func TestCloudInitAgreesWithCheckUserData(t *testing.T) {
	for data, valid := range map[string]bool{
		string(emptyUserData):                           true,
		"#cloud-config\n{}\n":                           true,
		"#cloud-config\npackages: [curl]\n":             true,
		"#cloud-config\r\npackages: [curl]\r\n":         true,
		"#cloud-config\nruncmd: [[a]]\nruncmd: [[b]]\n": true,
		"#cloud-config\n- a\n":                          false,
		"#cloud-config\nusers: [a\n":                    false,
		"#cloud-config\nusers:\n\t- a\n":                false,
	} {
		path := filepath.Join(t.TempDir(), "user-data")
		require.NoError(t, os.WriteFile(path, []byte(data), 0o600))
		out, err := exec.CommandContext(t.Context(), testenv.Program(t, "cloud-init"), "schema", "--config-file", path).CombinedOutput()
		require.Equal(t, valid, err == nil, "%q: %s", data, out)
		require.Equal(t, valid, CheckUserData([]byte(data)) == nil, "%q", data)
	}
}
