// Package instancetype manages instance types: named sizes of VMs, such as small for 2 vCPUs and 4 GiB. OpenStack calls
// them flavors. The main type is Service. Every authenticated caller may read the types. Only system:admin may change
// them.
//
// Decisions:
//   - The control plane does not use instance types when it creates or resizes a VM. The caller reads the type and sends
//     its sizes: the wire contract has no field for a type, and so a VM keeps its size when the type changes. Therefore a
//     type is not a limit. Quotas limit what callers may create.
//   - The sizes of a type are fixed. If they changed, a script that creates VMs of the type would get other VMs than
//     before, and two VMs of the same type could have different sizes. To change a size, an operator creates a type of
//     another name and makes the old type unavailable.
//   - A type that is not available is still listed, because VMs have it. Callers refuse it for new VMs and resizes.
//   - Delete does not depend on the VMs of the type, because VMs do not need it.
//   - There are at most Max types, so that a client can read all of them to let a user choose one.
//
// Keys: instance-type/<name>.
package instancetype

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Max is the maximum number of instance types of a cloud.
const Max = 200

// types is the table of instance types, at instance-type/<name>.
var types = store.NewTable[cloud.InstanceType]("instance-type")

// Service implements the instance types of one member.
type Service struct {
	store    *store.Store
	commands *leader.Commands
}

// New creates the service and registers the commands that other members forward to the leader.
func New(s *store.Store, commands *leader.Commands) *Service {
	c := &Service{s, commands}
	leader.Register(commands, c, createCommand, updateCommand, deleteCommand)
	return c
}

func noType(name string) error { return fault.New(fault.NotFound, "no instance type %s", name) }

// Get returns the type with this name, or NotFound.
func (s *Service) Get(ctx context.Context, name string) (t *cloud.InstanceType, err error) {
	if err := cloud.CheckName("name", name); err != nil {
		return nil, err
	}
	err = s.store.View(ctx, func(v *store.View) error {
		t, err = find(v, name)
		return err
	})
	return t, err
}

// find returns the type with this name, or NotFound.
func find(r store.Reader, name string) (*cloud.InstanceType, error) {
	t, err := types.Get(r, name)
	if err == nil && t == nil {
		err = noType(name)
	}
	return t, err
}

// List returns a page of the types, and the token of the next page.
func (s *Service) List(ctx context.Context, size int32, token string) ([]*cloud.InstanceType, string, error) {
	all := func(*cloud.InstanceType) bool { return true }
	return store.Page(ctx, s.store, types, store.PageRequest{Size: size, Token: token, Query: "instance-types"}, all)
}

// Result is the result of a call that changes a type. Replayed means that an earlier call with the same idempotency key
// made the change.
type Result struct {
	Type     cloud.InstanceType
	Replayed bool
}

// change is the request of a command that changes a type. Update is set only by updateCommand.
type change struct {
	Type   cloud.InstanceType
	Body   [32]byte
	Update cloud.InstanceTypeUpdate
}

var (
	createCommand = newCommand("instancetype.create", "CreateInstanceType", create)
	updateCommand = newCommand("instancetype.update", "UpdateInstanceType", update)
	deleteCommand = newCommand("instancetype.delete", "DeleteInstanceType", remove)
)

// newCommand returns a command that executes run in one transaction, at most once for each idempotency key.
func newCommand(
	name, method string, run func(*store.Tx, change) (cloud.InstanceType, error),
) *leader.Command[*Service, change, Result] {
	return leader.NewCommand(name, leader.Keyed, func(s *Service, ctx context.Context, q change) (out Result, err error) {
		_, err = s.store.Update(ctx, func(tx *store.Tx) error {
			caller := auth.CallerOf(ctx)
			out.Type, out.Replayed, err = store.Idempotent(tx, caller, store.OfPrincipal(caller.Name()), method, q.Body, func() (cloud.InstanceType, error) {
				return run(tx, q)
			})
			return err
		})
		return out, err
	})
}

// Create creates a type, which is available. body is the hash of the request, as in the other methods. Create returns
// AlreadyExists if a type has the name, and ResourceExhausted if there are Max types.
func (s *Service) Create(ctx context.Context, t cloud.InstanceType, body [32]byte) (Result, error) {
	if err := t.Check(); err != nil {
		return Result{}, err
	}
	t.Available = true
	return createCommand.Call(ctx, s.commands, change{Type: t, Body: body})
}

func create(tx *store.Tx, q change) (cloud.InstanceType, error) {
	t := q.Type
	if taken, err := types.Has(tx, t.Name); err != nil {
		return t, err
	} else if taken {
		return t, fault.New(fault.AlreadyExists, "the cloud has an instance type %s", t.Name)
	}
	all, _, err := types.List(tx, 0)
	if err != nil {
		return t, err
	}
	if len(all) >= Max {
		return t, fault.New(fault.ResourceExhausted, "the cloud has %d instance types: delete one first", Max)
	}
	t.CreatedAt, t.UpdatedAt = tx.Now(), tx.Now()
	types.Put(tx, &t, t.Name)
	return t, nil
}

// Update changes the type with this name. It returns NotFound if there is none, and InvalidArgument if a field is
// invalid.
func (s *Service) Update(ctx context.Context, name string, u cloud.InstanceTypeUpdate, body [32]byte) (Result, error) {
	if err := cloud.CheckName("name", name); err != nil {
		return Result{}, err
	}
	return updateCommand.Call(ctx, s.commands, change{Type: cloud.InstanceType{Name: name}, Body: body, Update: u})
}

func update(tx *store.Tx, q change) (cloud.InstanceType, error) {
	t, err := find(tx, q.Type.Name)
	if err != nil {
		return q.Type, err
	}
	changed, err := t.Update(q.Update)
	if err != nil || !changed {
		return *t, err
	}
	t.UpdatedAt = tx.Now()
	types.Put(tx, t, t.Name)
	return *t, nil
}

// Delete deletes the type with this name. It returns NotFound if there is none. VMs of the type are not changed.
func (s *Service) Delete(ctx context.Context, name string, body [32]byte) (Result, error) {
	if err := cloud.CheckName("name", name); err != nil {
		return Result{}, err
	}
	return deleteCommand.Call(ctx, s.commands, change{Type: cloud.InstanceType{Name: name}, Body: body})
}

func remove(tx *store.Tx, q change) (cloud.InstanceType, error) {
	t, err := find(tx, q.Type.Name)
	if err != nil {
		return q.Type, err
	}
	types.Delete(tx, t.Name)
	return *t, nil
}
