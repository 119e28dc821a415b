// Package storageclass manages storage classes: the kinds of storage in which volumes are made. The main type is
// Service.
//
// A class of the driver MANAGED names a storage pool: a directory that hosts have in their configuration under this
// name. A host serves the class if the host reports a pool of this name. To serve an encrypted class, the host must
// also report that it can encrypt volumes in the pool. A class of the driver RBD names a pool of a Ceph cluster. A host
// serves the class if the host reports that its guests can use RBD images. Only system:admin may change classes.
//
// Decisions:
//   - The driver, the storage pool, the Ceph cluster, the Ceph pool and the encryption of a class are fixed, because
//     the existing volumes of the class were made with them. The rest can be changed. Update only changes the record of
//     the class and increments StorageClass.Changes. Package volume then applies the change to the volumes of the
//     class. It uses several transactions, because a class may have many volumes.
//   - Create and Update accept a wrong address or key, because members have no connection to Ceph clusters. Hosts
//     report the error for each volume, and a further update corrects the class. The class keeps no former address or
//     key.
//   - The member that receives the key of a Ceph user encrypts the key with the cluster key before it sends or stores
//     the key. Only RBDPool decrypts the key, for the desired state of hosts.
//   - Bootstrap creates the class cloud.LocalClass once. If an operator deletes the class, it stays deleted.
//
// Keys: storage-class/<name>, storage-class-use/<class>/<volume>, storage-class-bootstrap/done.
package storageclass

import (
	"context"
	"slices"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// use is a record in the store which states that a volume belongs to a class. A class with such records cannot be
// deleted.
type use struct{ Project cloud.ProjectID }

// bootstrapped is a record in the store which states that Bootstrap has created the class cloud.LocalClass.
type bootstrapped struct{ At cloud.Time }

var (
	// Classes is the table of storage classes, at storage-class/<name>.
	Classes    = store.NewTable[cloud.StorageClass]("storage-class")
	uses       = store.NewTable[use]("storage-class-use")
	bootstraps = store.NewTable[bootstrapped]("storage-class-bootstrap")
)

// Service implements the storage classes of one member.
type Service struct {
	store    *store.Store
	commands *leader.Commands
	key      *clusterkey.Key
}

// New creates the service and registers the commands that other members forward to the leader. key encrypts the keys of
// Ceph users.
func New(s *store.Store, commands *leader.Commands, key *clusterkey.Key) *Service {
	c := &Service{s, commands, key}
	leader.Register(commands, c, createCommand, updateCommand, deleteCommand)
	return c
}

func noClass(name string) error { return fault.New(fault.NotFound, "no storage class %s", name) }

// Resolve returns the class with this name, or the default class if name is empty. It returns NotFound if there is no
// class of this name, and FailedPrecondition if name is empty and no class is the default. It returns InvalidArgument
// if the class has another driver than the parameter driver. An unspecified driver matches every class.
func Resolve(r store.Reader, name string, driver cloud.VolumeDriver) (c *cloud.StorageClass, err error) {
	if name == "" {
		c, err = defaultClass(r)
		if err == nil && c == nil {
			return nil, fault.New(fault.FailedPrecondition, "storage_class is required: the cloud has no default storage class")
		}
	} else if c, err = Classes.Get(r, name); err == nil && c == nil {
		return nil, noClass(name)
	}
	if err != nil {
		return nil, err
	}
	if driver != cloud.DriverUnspecified && driver != c.Driver {
		return nil, fault.Invalid("driver", "storage class %s has the driver %s, not %s", c.Name, c.Driver.Variant(), driver.Variant())
	}
	return c, nil
}

// defaultClass returns the default class, or nil if there is none.
func defaultClass(r store.Reader) (*cloud.StorageClass, error) {
	all, _, err := Classes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if c.Value.Default {
			return c.Value, nil
		}
	}
	return nil, nil
}

// Use records in tx that the volume belongs to the class. While this record exists, the class cannot be deleted.
func Use(tx *store.Tx, class string, project cloud.ProjectID, volume cloud.VolumeID) {
	uses.Put(tx, &use{project}, class, string(volume))
}

// Release deletes the record that Use wrote.
func Release(tx *store.Tx, class string, volume cloud.VolumeID) {
	uses.Delete(tx, class, string(volume))
}

// Served returns the names of the classes that a host serves, sorted by name.
func Served(r store.Reader, n *cloud.Node) (names []string, err error) {
	all, _, err := Classes.List(r, 0)
	for _, c := range all {
		serves := n.RBDShortage(c.Value.Encrypted) == ""
		if c.Value.Driver == cloud.DriverManaged {
			serves = slices.ContainsFunc(n.StoragePools, func(p cloud.StoragePool) bool {
				return p.Name == c.Value.Pool && (p.Encryption || !c.Value.Encrypted)
			})
		}
		if serves {
			names = append(names, c.Value.Name)
		}
	}
	return names, err
}

// sealName returns the name for which clusterkey seals the key of a class's Ceph user. A key that was sealed for one
// class cannot be opened for another class.
func sealName(class string) string { return "storage-class/" + class }

// RBDPool returns the Ceph pool of a class, including the key of the Ceph user in plain text. Send the result only to
// hosts that have volumes of the class. RBDPool returns nil if the class does not exist or has another driver. If the
// key cannot be opened with the cluster key, RBDPool returns an error and the pool without the key.
func RBDPool(r store.Reader, key *clusterkey.Key, class string) (*agentv1.RbdPool, error) {
	c, err := Classes.Get(r, class)
	if err != nil || c == nil || c.RBD == nil {
		return nil, err
	}
	pool := &agentv1.RbdPool{Fsid: c.RBD.FSID, Monitors: c.RBD.Monitors, Pool: c.RBD.Pool, User: c.RBD.User}
	plain, err := key.Open(sealName(class), c.RBD.SealedKey)
	pool.Key = string(plain)
	return pool, err
}

// Bootstrap creates the class cloud.LocalClass in a new cluster. Package leader runs it on the leader.
func (s *Service) Bootstrap(ctx context.Context) error {
	_, err := s.store.Update(ctx, func(tx *store.Tx) error {
		if done, err := bootstraps.Has(tx, "done"); err != nil || done {
			return err
		}
		bootstraps.Put(tx, &bootstrapped{tx.Now()}, "done")
		if has, err := Classes.Has(tx, cloud.LocalClass); err != nil || has {
			return err
		}
		c := cloud.StorageClass{
			Name: cloud.LocalClass, Driver: cloud.DriverManaged, Pool: cloud.LocalClass, Default: true, CreatedAt: tx.Now(), UpdatedAt: tx.Now(),
		}
		return put(tx, &c)
	})
	return err
}

// put stores a class. If c is the default class, put also removes the mark of the default class from the class that had
// the mark.
func put(tx *store.Tx, c *cloud.StorageClass) error {
	if c.Default {
		before, err := defaultClass(tx)
		if err != nil {
			return err
		}
		if before != nil && before.Name != c.Name {
			before.Default, before.UpdatedAt = false, tx.Now()
			Classes.Put(tx, before, before.Name)
		}
	}
	Classes.Put(tx, c, c.Name)
	return nil
}

// Get returns the class with this name, or NotFound.
func (s *Service) Get(ctx context.Context, name string) (c *cloud.StorageClass, err error) {
	if err := cloud.CheckName("name", name); err != nil {
		return nil, err
	}
	err = s.store.View(ctx, func(v *store.View) error {
		if c, err = Classes.Get(v, name); err == nil && c == nil {
			err = noClass(name)
		}
		return err
	})
	return c, err
}

// List returns a page of the classes, and the token of the next page.
func (s *Service) List(ctx context.Context, size int32, token string) ([]*cloud.StorageClass, string, error) {
	all := func(*cloud.StorageClass) bool { return true }
	return store.Page(ctx, s.store, Classes, store.PageRequest{Size: size, Token: token, Query: "storage-classes"}, all)
}

// Result is the result of a call that changes a class. Replayed means that an earlier call with the same idempotency
// key made the change.
type Result struct {
	Class    cloud.StorageClass
	Replayed bool
}

// change is the request of a command that changes a class. Update is set only by updateCommand.
type change struct {
	Class  cloud.StorageClass
	Body   [32]byte
	Update cloud.ClassUpdate
}

var (
	createCommand = newCommand("storageclass.create", "CreateStorageClass", create)
	// The name is not storageclass.update, because earlier versions have a command of this name with another request.
	updateCommand = newCommand("storageclass.change", "UpdateStorageClass", update)
	deleteCommand = newCommand("storageclass.delete", "DeleteStorageClass", remove)
)

// newCommand returns a command that executes run in one transaction, at most once for each idempotency key.
func newCommand(
	name, method string, run func(*store.Tx, cloud.StorageClass, cloud.ClassUpdate) (cloud.StorageClass, error),
) *leader.Command[*Service, change, Result] {
	return leader.NewCommand(name, leader.Keyed, func(s *Service, ctx context.Context, q change) (out Result, err error) {
		_, err = s.store.Update(ctx, func(tx *store.Tx) error {
			caller := auth.CallerOf(ctx)
			out.Class, out.Replayed, err = store.Idempotent(tx, caller, store.OfPrincipal(caller.Name()), method, q.Body, func() (cloud.StorageClass, error) {
				return run(tx, q.Class, q.Update)
			})
			return err
		})
		return out, err
	})
}

// Create creates a class. For the driver RBD, key is the key of the Ceph user. For other drivers, key is empty. body is
// the hash of the request, as in the other methods.
func (s *Service) Create(ctx context.Context, c cloud.StorageClass, key string, body [32]byte) (Result, error) {
	if err := c.Check(); err != nil {
		return Result{}, err
	}
	if c.RBD != nil {
		if err := cloud.CheckCephKey(key); err != nil {
			return Result{}, err
		}
		c.RBD.SealedKey = s.key.Seal(sealName(c.Name), []byte(key))
	}
	return createCommand.Call(ctx, s.commands, change{Class: c, Body: body})
}

func create(tx *store.Tx, c cloud.StorageClass, _ cloud.ClassUpdate) (cloud.StorageClass, error) {
	if taken, err := Classes.Has(tx, c.Name); err != nil {
		return c, err
	} else if taken {
		return c, fault.New(fault.AlreadyExists, "the cloud has a storage class %s", c.Name)
	}
	c.CreatedAt, c.UpdatedAt = tx.Now(), tx.Now()
	return c, put(tx, &c)
}

// Delete deletes a class. It returns FailedPrecondition if the class has volumes.
func (s *Service) Delete(ctx context.Context, name string, body [32]byte) (Result, error) {
	if err := cloud.CheckName("name", name); err != nil {
		return Result{}, err
	}
	return deleteCommand.Call(ctx, s.commands, change{Class: cloud.StorageClass{Name: name}, Body: body})
}

func remove(tx *store.Tx, q cloud.StorageClass, _ cloud.ClassUpdate) (cloud.StorageClass, error) {
	if has, err := Classes.Has(tx, q.Name); err != nil {
		return q, err
	} else if !has {
		return q, noClass(q.Name)
	}
	if used, _, err := uses.List(tx, 1, q.Name); err != nil {
		return q, err
	} else if len(used) > 0 {
		return q, fault.New(fault.FailedPrecondition, "storage class %s has volumes: delete them first", q.Name)
	}
	Classes.Delete(tx, q.Name)
	return q, nil
}
