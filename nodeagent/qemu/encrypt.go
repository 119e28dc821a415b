package qemu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// Key is the secret with which QEMU opens a disk. For an encrypted disk, Key is the LUKS passphrase, in printable ASCII
// because QEMU accepts only text. For a disk with an RBD image, Key is the key of the Ceph user, in base64. QEMU gets a
// Key over its monitor socket. The package stores no Key on disk, and no error contains a Key.
type Key []byte

// String returns a constant text, so that a key is not logged by mistake. GoString does the same for the verb %#v.
func (k Key) String() string { return "(key)" }

// GoString returns the same text as String.
func (k Key) GoString() string { return k.String() }

var (
	// ErrWrongKey means that the key of an encrypted disk does not decrypt the disk's file. Another attempt with this
	// key fails the same way.
	ErrWrongKey = errors.New("the key does not decrypt the disk's file: the file or the key belongs to another volume")

	errNoKey = errors.New("the disk is encrypted, and its key is not known")

	// errKeysLost means that the agent that started QEMU ended before it passed the keys of all disks to QEMU.
	errKeysLost = errors.New("the agent that started QEMU ended before it passed the keys of the disks")
)

// hasKey reports whether QEMU needs a key to open the disk: encrypted disks and disks with RBD images need one.
func (d Disk) hasKey() bool { return d.Encrypted || d.RBD != nil }

// hasKeys reports whether QEMU needs a key for at least one disk of the VM.
func (s Spec) hasKeys() bool { return slices.ContainsFunc(s.Disks, Disk.hasKey) }

// addNodes adds the block nodes of a disk to QEMU, and its throttle group if it has limits. The key is used only if the
// disk is encrypted or has an RBD image. The error wraps [ErrWrongKey] if the key does not decrypt the file of an
// encrypted disk.
//
// QEMU needs the key only while it opens the file or the image. From an encrypted file, QEMU decrypts the LUKS master
// key with the passphrase and keeps only the master key. The key of a Ceph user is passed to librados. addNodes
// therefore removes the key's secret object from QEMU before it returns.
func addNodes(ctx context.Context, conn *qmp.Conn, d Disk, sets diskSets, key Key) (err error) {
	if d.limited() {
		if err := conn.Do(ctx, "object-add", d.throttleGroup(), nil); err != nil {
			return err
		}
	}
	if d.hasKey() {
		format := "raw"
		if d.RBD != nil {
			format = "base64"
		}
		if err := addSecret(ctx, conn, d.secretID(), format, key); err != nil {
			return err
		}
		defer func() {
			if removeErr := deleteObject(ctx, conn, d.secretID()); err == nil {
				err = removeErr
			}
		}()
	}
	for _, node := range d.blockNodes(sets) {
		if err := conn.Do(ctx, "blockdev-add", node, nil); err != nil {
			var refusal *qmp.Error
			if d.Encrypted && errors.As(err, &refusal) && strings.Contains(refusal.Desc, "Invalid password") {
				return fmt.Errorf("%w: %w", ErrWrongKey, err)
			}
			return err
		}
	}
	return nil
}

// addSecret adds a secret object with a key to QEMU. No QMP reply contains the key. If format is base64, QEMU decodes
// the key.
func addSecret(ctx context.Context, conn *qmp.Conn, id, format string, key Key) error {
	if len(key) == 0 {
		return errNoKey
	}
	if err := deleteObject(ctx, conn, id); err != nil { // An earlier agent may have left the object.
		return err
	}
	return conn.Do(ctx, "object-add", object{"qom-type": "secret", "id": id, "format": format, "data": string(key)}, nil)
}

// unlockDisks adds the block nodes of the VM's encrypted disks and RBD images to a QEMU that has not created the
// machine yet. Nodes that an earlier call added stay as they are. An agent that did not start this QEMU does not have
// the keys: unlockDisks then returns errKeysLost, unless QEMU has all nodes already.
func (p *Process) unlockDisks(ctx context.Context) error {
	spec := p.Record().Spec
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		have, err := queryNodes(ctx, conn)
		if err != nil {
			return err
		}
		all, _ := spec.diskSets()
		for i, d := range spec.Disks {
			if !d.hasKey() || slices.Contains(have, d.node()) {
				continue
			}
			key, ok := p.keys[d.ID]
			if !ok {
				return errKeysLost
			}
			if err := addNodes(ctx, conn, d, all[i], key); err != nil {
				return err
			}
		}
		return nil
	})
}
