package storageclass

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Update changes the class with this name. key is the new key of the Ceph user, or empty if the key stays. u.SealedKey
// must be empty. Update returns NotFound if there is no class of this name, and InvalidArgument if a field is invalid.
func (s *Service) Update(ctx context.Context, name string, u cloud.ClassUpdate, key string, body [32]byte) (Result, error) {
	if err := cloud.CheckName("name", name); err != nil {
		return Result{}, err
	}
	if key != "" {
		if err := cloud.CheckCephKey(key); err != nil {
			return Result{}, err
		}
		u.SealedKey = s.key.Seal(sealName(name), []byte(key))
	}
	return updateCommand.Call(ctx, s.commands, change{Class: cloud.StorageClass{Name: name}, Body: body, Update: u})
}

// update implements Update in a transaction of the leader.
func update(tx *store.Tx, q cloud.StorageClass, u cloud.ClassUpdate) (cloud.StorageClass, error) {
	c, err := Classes.Get(tx, q.Name)
	if err != nil {
		return q, err
	}
	if c == nil {
		return q, noClass(q.Name)
	}
	changed, err := c.Update(u)
	if err != nil || !changed {
		return *c, err
	}
	c.UpdatedAt = tx.Now()
	return *c, put(tx, c)
}

// Change describes a class with changes that the leader has not applied to the volumes of the class yet.
type Change struct {
	// Class is the present record of the class.
	Class cloud.StorageClass
	// Volumes are the keys, in the table of volumes, of all volumes of the class. Some of these volumes may be deleted,
	// and have no record in the table, while their RBD images still exist.
	Volumes [][]string
}

// Unapplied returns a Change for each class with changes that the leader has not applied yet.
func Unapplied(r store.Reader) (out []Change, err error) {
	all, _, err := Classes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, one := range all {
		c := Change{Class: *one.Value}
		if c.Class.Changes == c.Class.Applied {
			continue
		}
		used, _, err := uses.List(r, 0, c.Class.Name)
		if err != nil {
			return nil, err
		}
		for _, u := range used {
			c.Volumes = append(c.Volumes, []string{string(u.Value.Project), u.Path[1]})
		}
		out = append(out, c)
	}
	return out, nil
}

// SetApplied records that the leader has applied the first n changes of a class (see StorageClass.Changes) to its
// volumes.
func SetApplied(tx *store.Tx, class string, n uint64) error {
	c, err := Classes.Get(tx, class)
	if err != nil || c == nil {
		return err
	}
	c.Applied = max(c.Applied, n)
	Classes.Put(tx, c, class)
	return nil
}
