package cloudinit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/mail"
	"net/netip"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/crypto/ssh"
)

var (
	validID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)
	// validHostName matches the DNS names of RFC 1123, without a dot at the end.
	validHostName = regexp.MustCompile(`^` + hostLabel + `(\.` + hostLabel + `)*$`)
)

const (
	hostLabel   = `[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?`
	maxHostName = 253 // bytes
	// minMTU is the smallest MTU of IPv4 (RFC 791).
	minMTU = 68
)

// check returns an error for the first field that exceeds a limit or is malformed.
func (i *Instance) check() error {
	if !validID.MatchString(i.ID) {
		return errors.New("the ID must be 1 to 128 letters, digits and characters of -._")
	}
	if i.HostName != "" && !isHostName(i.HostName) {
		return fmt.Errorf("the host name %q is not a DNS name", i.HostName)
	}
	total := 0
	for n, key := range i.SSHKeys {
		if err := CheckSSHKey(key); err != nil {
			return fmt.Errorf("SSH key %d: %w", n, err)
		}
		total += len(key)
	}
	if total > MaxSSHKeys {
		return fmt.Errorf("the SSH keys have %d bytes, more than %d", total, MaxSSHKeys)
	}
	if err := CheckUserData(i.UserData); err != nil {
		return fmt.Errorf("user data: %w", err)
	}
	if err := CheckUserData(i.VendorData); err != nil {
		return fmt.Errorf("vendor data: %w", err)
	}
	return checkNICs(i.NICs)
}

func checkNICs(nics []NIC) error {
	if len(nics) > MaxNICs {
		return fmt.Errorf("there are %d NICs, more than %d", len(nics), MaxNICs)
	}
	macs := map[string]bool{}
	gateway4, gateway6 := false, false
	for i, n := range nics {
		err := n.check()
		switch {
		case err != nil:
			return fmt.Errorf("NIC %d: %w", i, err)
		case macs[n.MAC.String()]:
			return fmt.Errorf("NIC %d: another NIC has the MAC address %s", i, n.MAC)
		case gateway4 && n.Gateway4.IsValid(), gateway6 && n.Gateway6.IsValid():
			return fmt.Errorf("NIC %d: another NIC has a gateway of the same address family", i)
		}
		macs[n.MAC.String()] = true
		gateway4, gateway6 = gateway4 || n.Gateway4.IsValid(), gateway6 || n.Gateway6.IsValid()
	}
	return nil
}

func isHostName(s string) bool { return len(s) <= maxHostName && validHostName.MatchString(s) }

// CheckSSHKey returns an error unless s is one line with one public key in the format of authorized_keys.
func CheckSSHKey(s string) error {
	if strings.ContainsAny(s, "\r\n\x00") {
		return errors.New("must be one line")
	}
	// The parser skips comments and empty lines, and then reports that there is no key.
	if _, _, _, _, err := ssh.ParseAuthorizedKey([]byte(s)); err != nil {
		return fmt.Errorf("must have the format of authorized_keys: %w", err)
	}
	return nil
}

// CheckUserData returns an error if data is longer than MaxUserData, or has one of these formats and is malformed:
//
//   - cloud-config (the first line is "#cloud-config"): must be a YAML mapping or empty.
//   - a script (it begins with "#!"): must name an interpreter.
//   - MIME (it begins with the header Content-Type or MIME-Version): must have complete parts.
//
// All other data is accepted: cloud-init has further formats, such as gzip, and images without cloud-init have their
// own.
func CheckUserData(data []byte) error {
	if len(data) > MaxUserData {
		return fmt.Errorf("has %d bytes, more than %d", len(data), MaxUserData)
	}
	line, _, _ := bytes.Cut(data, []byte("\n"))
	line = bytes.TrimSpace(line)
	header, _, _ := bytes.Cut(line, []byte(":"))
	switch {
	case string(line) == "#cloud-config":
		return checkCloudConfig(data)
	case bytes.HasPrefix(data, []byte("#!")):
		if len(bytes.TrimSpace(line[len("#!"):])) == 0 {
			return errors.New(`begins with "#!" but names no interpreter`)
		}
	case bytes.EqualFold(header, []byte("Content-Type")), bytes.EqualFold(header, []byte("MIME-Version")):
		return checkMIME(data)
	}
	return nil
}

// checkCloudConfig parses data without decoding it, because Go's decoder rejects duplicate keys, which cloud-init's
// permits.
func checkCloudConfig(data []byte) error {
	var document yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(data))
	err := d.Decode(&document)
	switch {
	case errors.Is(err, io.EOF): // nothing but comments
		return nil
	case err != nil:
		return fmt.Errorf("is cloud-config but not YAML: %w", err)
	}
	content := document.Content[0]
	if content.Kind != yaml.MappingNode && content.Tag != "!!null" {
		return errors.New("is cloud-config but not a YAML mapping")
	}
	if err := d.Decode(&document); !errors.Is(err, io.EOF) {
		return errors.New("is cloud-config but has more than one YAML document")
	}
	return nil
}

// checkMIME reads all parts of a MIME message.
func checkMIME(data []byte) error {
	m, err := mail.ReadMessage(bytes.NewReader(data))
	if err != nil {
		return fmt.Errorf("has a malformed MIME header: %w", err)
	}
	contentType := m.Header.Get("Content-Type")
	if contentType == "" { // RFC 2045: then it is text/plain
		return nil
	}
	mediaType, parameters, err := mime.ParseMediaType(contentType)
	if err != nil {
		return fmt.Errorf("has a malformed Content-Type: %w", err)
	}
	if !strings.HasPrefix(mediaType, "multipart/") {
		return nil
	}
	if parameters["boundary"] == "" {
		return fmt.Errorf("has the Content-Type %s without a boundary", mediaType)
	}
	parts := multipart.NewReader(m.Body, parameters["boundary"])
	for n := 0; ; n++ {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) && n > 0 {
			return nil
		}
		if err == nil {
			_, err = io.Copy(io.Discard, part)
		}
		if err != nil {
			return fmt.Errorf("MIME part %d: %w", n, err)
		}
	}
}

// check returns an error for the first field of the NIC that exceeds a limit or is malformed.
func (n *NIC) check() error {
	if len(n.MAC) != 6 || n.MAC[0]&1 != 0 {
		return fmt.Errorf("%q is not the Ethernet address of an interface", n.MAC)
	}
	if n.MTU != 0 && n.MTU < minMTU {
		return fmt.Errorf("the MTU is %d, less than %d", n.MTU, minMTU)
	}
	if max(len(n.Addresses), len(n.Routes), len(n.DNS), len(n.Search)) > MaxPerNIC {
		return fmt.Errorf("has more than %d addresses, routes, resolvers or search domains", MaxPerNIC)
	}
	for _, a := range n.Addresses {
		if !a.IsValid() || a.Addr().Is4In6() || a.Addr().IsMulticast() || a.Addr().IsUnspecified() {
			return fmt.Errorf("%s is not the address of an interface", a)
		}
	}
	if err := n.checkGateway("IPv4", n.Gateway4, netip.Addr.Is4); err != nil {
		return err
	}
	if err := n.checkGateway("IPv6", n.Gateway6, netip.Addr.Is6); err != nil {
		return err
	}
	for _, r := range n.Routes {
		validTo := r.To.IsValid() && r.To.Bits() > 0 && r.To == r.To.Masked()
		validVia := r.Via.IsValid() && r.Via.Zone() == "" && r.Via.Is4() == r.To.Addr().Is4()
		if !validTo || !validVia {
			return fmt.Errorf("the route to %s via %s is not valid", r.To, r.Via)
		}
	}
	for _, a := range n.DNS {
		if !a.IsValid() || a.Zone() != "" {
			return fmt.Errorf("%s is not the address of a resolver", a)
		}
	}
	for _, domain := range n.Search {
		if !isHostName(domain) {
			return fmt.Errorf("the search domain %q is not a DNS name", domain)
		}
	}
	return nil
}

// checkGateway accepts an invalid address, which means that there is no gateway of the family.
func (n *NIC) checkGateway(family string, gateway netip.Addr, inFamily func(netip.Addr) bool) error {
	if !gateway.IsValid() {
		return nil
	}
	if !inFamily(gateway) {
		return fmt.Errorf("the %s gateway is %s", family, gateway)
	}
	for _, a := range n.Addresses {
		if a.Contains(gateway) {
			return nil
		}
	}
	return fmt.Errorf("the gateway %s is in the subnet of no static address", gateway)
}
