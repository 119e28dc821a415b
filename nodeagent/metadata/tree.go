package metadata

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

// versions are the versions of EC2's tree up to that of 2021, in the order in which EC2 lists them.
var versions = []string{
	"1.0", "2007-01-19", "2007-03-01", "2007-08-29", "2007-10-10", "2007-12-15", "2008-02-01", "2008-09-01", "2009-04-04",
	"2011-01-01", "2011-05-01", "2012-01-12", "2014-02-25", "2014-11-05", "2015-10-20", "2016-04-19", "2016-06-30",
	"2016-09-02", "2018-03-28", "2018-08-17", "2018-09-24", "2019-10-01", "2020-10-27", "2021-01-03", "2021-03-23",
	"2021-07-15", "latest",
}

// Types of contents.
const (
	textPlain   = "text/plain; charset=utf-8"
	octetStream = "application/octet-stream"
)

// node is a directory or a file of a tree. Exactly one of children and content is used.
type node struct {
	name string
	// title is the line in the directory's listing if that differs from the name.
	title       string
	children    []node
	content     []byte
	contentType string
}

func file(name, content string) node {
	return node{name: name, content: []byte(content), contentType: textPlain}
}

func lines[T any](name string, values []T) node {
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = fmt.Sprint(v)
	}
	return file(name, strings.Join(out, "\n"))
}

// directory sorts the children by name. It leaves out empty files and empty directories: EC2 has no paths for values
// that an instance does not have.
func directory(name string, children ...node) node {
	children = slices.DeleteFunc(children, func(n node) bool { return len(n.content) == 0 && len(n.children) == 0 })
	slices.SortFunc(children, func(a, b node) int { return cmp.Compare(a.name, b.name) })
	return node{name: name, children: children}
}

// list returns the response to a request for a directory: a line for each child, with a slash after the names of
// directories, and no line end after the last.
func (n *node) list() string {
	out := make([]string, len(n.children))
	for i, c := range n.children {
		switch {
		case c.title != "":
			out[i] = c.title
		case c.children != nil:
			out[i] = c.name + "/"
		default:
			out[i] = c.name
		}
	}
	return strings.Join(out, "\n")
}

// find returns the content for a path below n, and its type. ok is false if there is no such path.
func (n *node) find(path []string) (content []byte, contentType string, ok bool) {
	for _, name := range path {
		i := slices.IndexFunc(n.children, func(c node) bool { return c.name == name })
		if i < 0 {
			return nil, "", false
		}
		n = &n.children[i]
	}
	if n.children != nil {
		return []byte(n.list()), textPlain, true
	}
	return n.content, n.contentType, true
}

// resolve returns the content of a path for an instance, and its type. A slash at the end of the path has no meaning.
// ok is false for unknown paths.
func resolve(i *Instance, path string) (content []byte, contentType string, ok bool) {
	path, ok = strings.CutPrefix(path, "/")
	if !ok {
		return nil, "", false
	}
	path = strings.TrimSuffix(path, "/")
	if path == "" {
		return []byte(strings.Join(versions, "\n")), textPlain, true
	}
	names := strings.Split(path, "/")
	switch {
	case names[0] == "nocloud":
		tree := noCloudTree(i)
		return tree.find(names[1:])
	case slices.Contains(versions, names[0]):
		tree := ec2Tree(i)
		return tree.find(names[1:])
	}
	return nil, "", false
}

// noCloudTree returns the tree below /nocloud. It has empty files, because cloud-init requires user-data.
func noCloudTree(i *Instance) node {
	root := node{}
	for _, name := range []string{
		cloudinit.MetaDataFile, cloudinit.NetworkConfigFile, cloudinit.UserDataFile, cloudinit.VendorDataFile,
	} {
		content, _ := i.NoCloud.ByName(name)
		root.children = append(root.children, node{name: name, content: content, contentType: octetStream})
	}
	return root
}

// ec2Tree returns the tree below /latest. In this directory, EC2 lists names of directories without a slash.
func ec2Tree(i *Instance) node {
	metaData := directory("meta-data", slices.Concat(
		[]node{
			file("instance-id", i.ID),
			file("hostname", i.HostName),
			file("local-hostname", i.HostName),
			directory("placement", file("availability-zone", i.Zone), file("region", i.Region)),
			publicKeys(i.SSHKeys),
			directory("network", directory("interfaces", interfaces(i))),
		},
		primary(i),
	)...)
	metaData.title = metaData.name
	dynamic := directory("dynamic", directory("instance-identity", identityDocument(i)))
	dynamic.title = dynamic.name
	userData := node{name: "user-data", content: i.NoCloud.UserData, contentType: octetStream}
	return directory("", dynamic, metaData, userData)
}

// identityDocument returns the file instance-identity/document: the fields of EC2's document that an Instance has.
// Other fields, such as accountId and imageId, are missing.
func identityDocument(i *Instance) node {
	document := struct {
		AvailabilityZone string `json:"availabilityZone,omitempty"`
		InstanceID       string `json:"instanceId"`
		PrivateIP        string `json:"privateIp,omitempty"`
		Region           string `json:"region,omitempty"`
		Version          string `json:"version"`
	}{AvailabilityZone: i.Zone, InstanceID: i.ID, Region: i.Region, Version: "2017-09-30"}
	if len(i.NICs) > 0 && len(i.NICs[0].IPs) > 0 {
		document.PrivateIP = i.NICs[0].IPs[0].String()
	}
	content, _ := json.MarshalIndent(document, "", "  ") // a struct of strings can always be encoded
	return file("document", string(content))
}

// primary returns the files about the primary interface in meta-data.
func primary(i *Instance) []node {
	if len(i.NICs) == 0 {
		return nil
	}
	n := i.NICs[0]
	files := []node{file("mac", n.MAC.String())}
	if len(n.IPs) > 0 {
		files = append(files, file("local-ipv4", n.IPs[0].String()))
	}
	if len(n.IP6s) > 0 {
		files = append(files, file("ipv6", n.IP6s[0].String()))
	}
	return files
}

// publicKeys returns the directory public-keys, whose entries are listed as "0=name" and have the path "0".
func publicKeys(keys []string) node {
	entries := make([]node, len(keys))
	for n, key := range keys {
		number := strconv.Itoa(n)
		entries[n] = directory(number, file("openssh-key", key+"\n"))
		entries[n].title = number + "=key-" + number
	}
	return node{name: "public-keys", children: entries} // in numerical order
}

// interfaces returns the directory network/interfaces/macs.
func interfaces(i *Instance) node {
	macs := make([]node, len(i.NICs))
	for number, n := range i.NICs {
		macs[number] = directory(n.MAC.String(),
			file("device-number", strconv.Itoa(number)),
			file("interface-id", string(n.Port)),
			file("local-hostname", i.HostName),
			lines("local-ipv4s", n.IPs),
			lines("ipv6s", n.IP6s),
			file("mac", n.MAC.String()),
			lines("security-group-ids", n.SecurityGroups),
			file("subnet-id", string(n.Subnet)),
			file("subnet-ipv4-cidr-block", text(n.SubnetCIDR)),
			file("subnet-ipv6-cidr-blocks", text(n.SubnetCIDR6)),
			file("vpc-id", string(n.VPC)),
			file("vpc-ipv4-cidr-block", text(n.VPCCIDR)),
			file("vpc-ipv4-cidr-blocks", text(n.VPCCIDR)),
			file("vpc-ipv6-cidr-blocks", text(n.VPCCIDR6)),
		)
	}
	return directory("macs", macs...)
}

// text returns the prefix, or an empty text for an invalid one.
func text(p netip.Prefix) string {
	if !p.IsValid() {
		return ""
	}
	return p.String()
}
