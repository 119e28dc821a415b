package qemu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// Key is a secret with which QEMU opens a disk. QEMU gets a Key over its monitor socket. The package stores no Key on
// disk, and no error contains a Key.
type Key []byte

// Keys are the secrets with which QEMU opens one disk.
type Keys struct {
	// Key is the LUKS passphrase of an encrypted disk, in printable ASCII because QEMU accepts only text. It is empty
	// for other disks.
	Key Key
	// User is the key of the Ceph user of a disk with an RBD image, in base64. It is empty for other disks.
	User Key
}

// String returns a constant text, so that a key is not logged by mistake. GoString does the same for the verb %#v.
func (k Key) String() string { return "(key)" }

// GoString returns the same text as String.
func (k Key) GoString() string { return k.String() }

var (
	// ErrWrongKey means that the key of an encrypted disk does not decrypt the disk's file or RBD image. Another
	// attempt with this key fails the same way.
	ErrWrongKey = errors.New("the key does not decrypt the disk's file: the file or the key belongs to another volume")

	errNoKey = errors.New("the key of the disk is not known")

	// errKeysLost means that the agent that started QEMU ended before it passed the keys of all disks to QEMU.
	errKeysLost = errors.New("the agent that started QEMU ended before it passed the keys of the disks")
)

// hasKey reports whether QEMU needs a key to open the disk: encrypted disks and disks with RBD images need one.
func (d Disk) hasKey() bool { return d.Encrypted || d.RBD != nil }

// hasKeys reports whether QEMU needs a key for at least one disk of the VM.
func (s Spec) hasKeys() bool { return slices.ContainsFunc(s.Disks, Disk.hasKey) }

// addNodes adds the block nodes of a disk to QEMU, and its throttle group if it has limits. The error wraps
// [ErrWrongKey] if keys.Key does not decrypt the file or the RBD image of an encrypted disk.
//
// QEMU needs the keys only while it opens the file or the image. QEMU decrypts the LUKS master key with the passphrase
// and keeps only the master key. The key of a Ceph user is passed to librados. addNodes therefore removes the secret
// objects with the keys from QEMU before it returns.
func addNodes(ctx context.Context, conn *qmp.Conn, d Disk, sets diskSets, keys Keys) (err error) {
	if d.limited() {
		if err := conn.Do(ctx, "object-add", d.throttleGroup(), nil); err != nil {
			return err
		}
	}
	for _, s := range d.secrets(keys) {
		if err := addSecret(ctx, conn, s.id, s.format, s.key); err != nil {
			return err
		}
		defer func() {
			if removeErr := deleteObject(ctx, conn, s.id); err == nil {
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

// secret is a secret object of QEMU.
type secret struct {
	id     string
	format string // raw or base64
	key    Key
}

// secrets returns the secret objects that the block nodes of the disk refer to.
func (d Disk) secrets(keys Keys) (all []secret) {
	if d.Encrypted {
		all = append(all, secret{d.secretID(), "raw", keys.Key})
	}
	if d.RBD != nil {
		all = append(all, secret{d.userSecretID(), "base64", keys.User})
	}
	return all
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
			keys, ok := p.keys[d.ID]
			if !ok {
				return errKeysLost
			}
			if err := addNodes(ctx, conn, d, all[i], keys); err != nil {
				return err
			}
		}
		return nil
	})
}

// ReopenedDisks returns the IDs of the disks that QEMU opens again when the guest continues after a switchover:
// encrypted QCOW2 files. QEMU then needs their keys again. If it does not get them, it cannot use the disk any more.
func (s Spec) ReopenedDisks() (ids []string) {
	for _, d := range s.Disks {
		if d.Encrypted && d.RBD == nil {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// withKeys calls f while QEMU has the secret objects with the keys of these disks. The map is by disk ID.
func (p *Process) withKeys(ctx context.Context, keys map[string]Key, f func() error) (failed error) {
	for _, d := range p.Record().Spec.Disks {
		key, ok := keys[d.ID]
		if !ok {
			continue
		}
		err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			return addSecret(ctx, conn, d.secretID(), "raw", key)
		})
		if err != nil {
			return err
		}
		defer func() {
			failed = errors.Join(failed, p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
				return deleteObject(ctx, conn, d.secretID())
			}))
		}()
	}
	return f()
}
