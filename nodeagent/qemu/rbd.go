package qemu

import (
	"errors"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
)

// RBDImage names an RBD image of a Ceph cluster. QEMU opens the image with librbd. RBDImage does not contain the key of
// the Ceph user (see [Keys]), because the Spec with the RBDImage is stored on disk.
type RBDImage struct {
	Monitors []string `json:"monitors"` // each an IP address and a port
	Pool     string   `json:"pool"`
	Image    string   `json:"image"`
	User     string   `json:"user"` // without "client."
}

var (
	validRBDName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}$`)
	validRBDKey  = regexp.MustCompile(`^[A-Za-z0-9+/]{1,512}={0,2}$`)
)

// ErrNoNetwork means that a running QEMU cannot reach Ceph clusters, because it was started in a network namespace of
// its own. After the next start of the VM, QEMU can reach them.
var ErrNoNetwork = errors.New("the VM cannot use RBD volumes before its next start: it was started when this host did not serve RBD")

// validateRBD returns an error that wraps ErrInvalid if d is not a valid disk with an RBD image.
func (d Disk) validateRBD() error {
	for _, name := range []string{d.RBD.Pool, d.RBD.Image, d.RBD.User} {
		if !validRBDName.MatchString(name) {
			return invalid("disk %s: %q is not a name of a Ceph pool, image or user", d.ID, name)
		}
	}
	if len(d.RBD.Monitors) == 0 {
		return invalid("disk %s: its Ceph cluster has no monitors", d.ID)
	}
	for _, m := range d.RBD.Monitors {
		if _, err := netip.ParseAddrPort(m); err != nil {
			return invalid("disk %s: the monitor %q is not an address and a port", d.ID, m)
		}
	}
	if d.Base != "" {
		return invalid("disk %s: an RBD image cannot have a base image", d.ID)
	}
	return nil
}

// rbdNode returns the block node of the disk's RBD image.
func (d Disk) rbdNode() object {
	var servers []object
	for _, m := range d.RBD.Monitors {
		at := netip.MustParseAddrPort(m) // checked by validateRBD
		servers = append(servers, object{"host": at.Addr().String(), "port": strconv.Itoa(int(at.Port()))})
	}
	return object{"driver": "rbd", "node-name": d.fileNode(), "pool": d.RBD.Pool, "image": d.RBD.Image, "user": d.RBD.User,
		"key-secret": d.userSecretID(), "auth-client-required": []string{"cephx"}, "server": servers}
}

func hasRBD(disks []Disk) bool {
	return slices.ContainsFunc(disks, func(d Disk) bool { return d.RBD != nil })
}

// cephConfPath is the path of librados' configuration in QEMU's own mount namespace.
const cephConfPath = "/etc/ceph/ceph.conf"

// cephConf is librados' configuration for QEMU. An attempt to connect fails after client_mount_timeout (in seconds).
// This time is short, because QEMU executes no QMP command while it connects. I/O requests of guests have no timeout:
// they wait until the cluster answers.
const cephConf = `[global]
client_mount_timeout = 8
rados_mon_op_timeout = 8
log_file = /dev/null
log_to_stderr = false
admin_socket =
`
