package cloudinit

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	ed25519Key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAICTOlZZ+XO9BvI2oR4o5aTRbdRqZQNsG1jvdR2MJSSPo alice@example.com"
	ecdsaKey   = "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAA" +
		"BBBLqoTE8lw50MFPfWFUNpqWo0UMxItLTpW/pMU9FqqzYKNXDd+H4AxyCiEeo+RtcrPDBOEQ6b1KT5lGWt01WPuAo= bob"
)

func TestCheckSSHKey(t *testing.T) {
	for _, good := range []string{ed25519Key, ecdsaKey, `no-pty,command="/bin/true" ` + ed25519Key, strings.TrimSuffix(ecdsaKey, " bob")} {
		require.NoError(t, CheckSSHKey(good))
	}
	for name, bad := range map[string]string{
		"empty":          "",
		"comment":        "# " + ed25519Key,
		"two lines":      ed25519Key + "\n" + ecdsaKey,
		"line end":       ed25519Key + "\n",
		"return":         ed25519Key + "\rssh-rsa",
		"truncated":      ed25519Key[:40],
		"private key":    "-----BEGIN OPENSSH PRIVATE KEY-----",
		"only algorithm": "ssh-ed25519",
		"wrong type":     "ssh-rsa " + strings.Fields(ed25519Key)[1][:10],
	} {
		require.Error(t, CheckSSHKey(bad), name)
	}
}

func TestCheckUserData(t *testing.T) {
	mixed := "Content-Type: multipart/mixed; boundary=\"==b==\"\nMIME-Version: 1.0\n\n--==b==\nContent-Type: text/x-shellscript\n\n" +
		"#!/bin/sh\ntrue\n--==b==\nContent-Type: text/cloud-config\n\n{}\n--==b==--\n"
	for name, c := range map[string]struct {
		data string
		want string // part of the error, or empty
	}{
		"empty":                         {"", ""},
		"script":                        {"#!/bin/sh\necho hello\n", ""},
		"script with space":             {"#! /usr/bin/env python3\n", ""},
		"script without interpreter":    {"#!\necho hello\n", "names no interpreter"},
		"cloud-config":                  {"#cloud-config\npackages: [curl]\n", ""},
		"cloud-config with CRLF":        {"#cloud-config\r\npackages: [curl]\r\n", ""},
		"empty cloud-config":            {"#cloud-config\n", ""},
		"null cloud-config":             {"#cloud-config\n---\n", ""},
		"cloud-config, duplicate keys":  {"#cloud-config\nruncmd: [a]\nruncmd: [b]\n", ""},
		"cloud-config, list":            {"#cloud-config\n- a\n", "not a YAML mapping"},
		"cloud-config, text":            {"#cloud-config\napt-get update\n", "not a YAML mapping"},
		"cloud-config, not YAML":        {"#cloud-config\nusers: [a\n", "not YAML"},
		"cloud-config, tab":             {"#cloud-config\nusers:\n\t- a\n", "not YAML"},
		"cloud-config, two documents":   {"#cloud-config\na: 1\n---\nb: 2\n", "more than one YAML document"},
		"cloud-config-archive, a list":  {"#cloud-config-archive\n- type: text/cloud-config\n  content: '{}'\n", ""},
		"MIME":                          {mixed, ""},
		"MIME in lower case":            {strings.ToLower(mixed), ""},
		"MIME, one part":                {"MIME-Version: 1.0\nContent-Type: text/x-shellscript\n\n#!/bin/sh\n", ""},
		"MIME, no type":                 {"MIME-Version: 1.0\n\nhello\n", ""},
		"MIME, no boundary":             {"Content-Type: multipart/mixed\n\nhello\n", "without a boundary"},
		"MIME, end missing":             {strings.Replace(mixed, "--==b==--\n", "", 1), "MIME part 1"},
		"MIME, no parts":                {"Content-Type: multipart/mixed; boundary=b\n\nhello\n", "MIME part 0"},
		"MIME, malformed type":          {"Content-Type: ;;;\n\n", "malformed Content-Type"},
		"MIME, malformed header":        {"MIME-Version: 1.0\nhello\n\n", "malformed MIME header"},
		"other format":                  {"{\"ignition\": {\"version\": \"3.0.0\"}}", ""},
		"gzip":                          {"\x1f\x8b\x08\x00\x00", ""},
		"text":                          {"hello", ""},
		"colon":                         {"name: web\n", ""},
		"as long as permitted":          {strings.Repeat("x", MaxUserData), ""},
		"too long":                      {strings.Repeat("x", MaxUserData+1), "65537 bytes, more than 65536"},
		"cloud-config with jinja":       {"## template: jinja\n#cloud-config\n{% if a %}\n", ""},
		"cloud-config with many levels": {"#cloud-config\n" + strings.Repeat("[", 20000), "not YAML"},
	} {
		err := CheckUserData([]byte(c.data))
		if c.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, c.want, name)
		}
	}
}

// TestRenderRefuses changes one field of a valid instance at a time.
func TestRenderRefuses(t *testing.T) {
	const valid = `
id: vm-1
host_name: web
nics:
- {mac: "02:00:00:00:00:01", addresses: [10.0.0.5/24, "fd00::5/64"], gateway4: 10.0.0.1, gateway6: "fd00::1", dns: [10.0.0.1], routes: [{to: 10.9.0.0/16, via: 10.0.0.2}]}
- {mac: "02:00:00:00:00:02", dhcp4: true}
`
	_, err := Render(parseInstance(t, valid))
	require.NoError(t, err)
	for _, c := range []struct{ old, change, want string }{
		{"id: vm-1", "id: ''", "the ID must be"},
		{"id: vm-1", `id: "a\nb"`, "the ID must be"},
		{"id: vm-1", "id: ../vm", "the ID must be"},
		{"host_name: web", "host_name: -web", "not a DNS name"},
		{"host_name: web", "host_name: web.", "not a DNS name"},
		{"host_name: web", "host_name: we b", "not a DNS name"},
		{"host_name: web", "host_name: " + strings.Repeat("a", 64), "not a DNS name"},
		{"host_name: web", "host_name: " + strings.Repeat("a.", 127) + "a", "not a DNS name"},
		{"host_name: web", "ssh_keys: [nothing]", "SSH key 0"},
		{"host_name: web", "user_data: '#!'", "user data: "},
		{"host_name: web", "vendor_data: '#!'", "vendor data: "},
		{`"02:00:00:00:00:02"`, `"02:00:00:00:00:01"`, "NIC 1: another NIC has the MAC address 02:00:00:00:00:01"},
		{`"02:00:00:00:00:02"`, `"03:00:00:00:00:02"`, "not the Ethernet address of an interface"},
		{`"02:00:00:00:00:02"`, `"02:00:00:00:00:00:00:02"`, "not the Ethernet address of an interface"},
		{"dhcp4: true", "mtu: 67", "MTU is 67"},
		{"dhcp4: true", "addresses: [224.0.0.1/24]", "not the address of an interface"},
		{"dhcp4: true", "addresses: [0.0.0.0/24]", "not the address of an interface"},
		{"dhcp4: true", `addresses: ["::ffff:10.0.0.1/120"]`, "not the address of an interface"},
		{"gateway4: 10.0.0.1", "gateway4: 10.0.1.1", "in the subnet of no static address"},
		{"gateway4: 10.0.0.1", `gateway4: "fd00::1"`, "the IPv4 gateway is fd00::1"},
		{`gateway6: "fd00::1"`, "gateway6: 10.0.0.1", "the IPv6 gateway is 10.0.0.1"},
		{"to: 10.9.0.0/16", "to: 10.9.0.1/16", "the route to 10.9.0.1/16"},
		{"dhcp4: true", "addresses: [10.1.0.5/24], gateway4: 10.1.0.1", "NIC 1: another NIC has a gateway"},
		{"dhcp4: true", `addresses: ["fd01::5/64"], gateway6: "fd01::1"`, "NIC 1: another NIC has a gateway"},
		{"to: 10.9.0.0/16", "to: 0.0.0.0/0", "the route to 0.0.0.0/0"},
		{"to: 10.9.0.0/16", `to: "fd01::/64"`, "the route to fd01::/64"},
		{"dns: [10.0.0.1]", `dns: ["fe80::1%eth0"]`, "not the address of a resolver"},
		{"dns: [10.0.0.1]", `search: ["a b"]`, "the search domain"},
		{"dns: [10.0.0.1]", "search: [" + strings.Repeat("a,", MaxPerNIC) + "a]", "more than 64"},
	} {
		require.Contains(t, valid, c.old)
		_, err := Render(parseInstance(t, strings.Replace(valid, c.old, c.change, 1)))
		require.ErrorContains(t, err, c.want, c.change)
	}

	many := &Instance{ID: "i"}
	for range MaxSSHKeys/len(ed25519Key) + 1 {
		many.SSHKeys = append(many.SSHKeys, ed25519Key)
	}
	_, err = Render(many)
	require.ErrorContains(t, err, "the SSH keys have")
	_, err = Render(&Instance{ID: "i", NICs: make([]NIC, MaxNICs+1)})
	require.ErrorContains(t, err, "33 NICs")
}

// largest returns an instance whose files are as large as the limits permit.
func largest(t *testing.T) *Instance {
	t.Helper()
	i := &Instance{ID: strings.Repeat("i", 128), HostName: strings.Repeat("a.", 126) + "a"}
	for range MaxSSHKeys / len(ecdsaKey) {
		i.SSHKeys = append(i.SSHKeys, ecdsaKey)
	}
	i.UserData, i.VendorData = bytes.Repeat([]byte("u"), MaxUserData), bytes.Repeat([]byte("v"), MaxUserData)
	return i
}
