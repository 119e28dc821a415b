package network

import (
	"context"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// externals is the table of external networks, at external-network/<name>.
var externals = store.NewTable[cloud.ExternalNetwork]("external-network")

// externalChange is the request of a command for an external network, which belongs to no project.
type externalChange[Q any] struct {
	Body    [32]byte
	Request Q
}

// newExternalCommand is newCommand for commands for external networks.
func newExternalCommand[Q, T any](
	name, method string, run func(*store.Tx, Q) (T, error),
) *leader.Command[*Service, externalChange[Q], Result[T]] {
	return leader.NewCommand(name, leader.Keyed, func(s *Service, ctx context.Context, c externalChange[Q]) (out Result[T], err error) {
		_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			caller := auth.CallerOf(ctx)
			out.Value, out.Replayed, err = store.Idempotent(tx, caller, store.OfPrincipal(caller.Name()), method, c.Body, func() (T, error) {
				return run(tx, c.Request)
			})
			return err
		})
		return out, err
	})
}

// ExternalInfo is an external network with the number of addresses that can be assigned now.
type ExternalInfo struct {
	cloud.ExternalNetwork
	Available uint64
}

func externalInfo(r store.Reader, n *cloud.ExternalNetwork) (out ExternalInfo, err error) {
	size, err := poolSize(n)
	if err != nil {
		return out, err
	}
	free, err := available(r, poolOwner(n.Name), size)
	return ExternalInfo{*n, free}, err
}

// CreateExternalNetwork creates the record of an external network.
func (s *Service) CreateExternalNetwork(
	ctx context.Context, n cloud.ExternalNetwork, body [32]byte,
) (Result[ExternalInfo], error) {
	if err := n.Check(); err != nil {
		return Result[ExternalInfo]{}, err
	}
	return createExternalCommand.Call(ctx, s.opts.Commands, externalChange[cloud.ExternalNetwork]{body, n})
}

var createExternalCommand = newExternalCommand("network.external.create", "CreateExternalNetwork", createExternal)

// createExternal implements CreateExternalNetwork in a transaction of the leader.
func createExternal(tx *store.Tx, n cloud.ExternalNetwork) (out ExternalInfo, err error) {
	taken, err := externals.Has(tx, n.Name)
	if err != nil {
		return out, err
	}
	if taken {
		return out, fault.New(fault.AlreadyExists, "the cloud has an external network with the name %s", n.Name)
	}
	n.CreatedAt, n.UpdatedAt = tx.Now(), tx.Now()
	externals.Put(tx, &n, n.Name)
	return externalInfo(tx, &n)
}

// GetExternalNetwork returns an external network, or NotFound.
func (s *Service) GetExternalNetwork(ctx context.Context, name string) (out ExternalInfo, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		n, err := findExternal(v, name)
		if err != nil {
			return err
		}
		out, err = externalInfo(v, n)
		return err
	})
	return out, err
}

// findExternal returns the external network with this name. An empty name means the only external network.
func findExternal(r store.Reader, name string) (*cloud.ExternalNetwork, error) {
	if name == "" {
		all, more, err := externals.List(r, 1)
		switch {
		case err != nil:
			return nil, err
		case len(all) == 0:
			return nil, fault.New(fault.FailedPrecondition, "the cloud has no external network: an operator must create one").
				WithReason("NO_EXTERNAL_NETWORK")
		case more:
			return nil, fault.Invalid("external_network", "is required, because the cloud has several").
				With("constraint", "required")
		}
		return all[0].Value, nil
	}
	n, err := externals.Get(r, name)
	if err == nil && n == nil {
		return nil, notFound("external network", name)
	}
	return n, err
}

// ListExternalNetworks returns a page of the external networks, and the token of the next page.
func (s *Service) ListExternalNetworks(ctx context.Context, p page) (out []ExternalInfo, next string, err error) {
	all, next, err := store.Page(ctx, s.opts.Store, externals,
		store.PageRequest{Size: p.Size, Token: p.Token, Query: "external\x00" + p.Name},
		func(n *cloud.ExternalNetwork) bool { return p.Name == "" || n.Name == p.Name })
	if err != nil {
		return nil, "", err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		out = nil
		for _, n := range all {
			info, err := externalInfo(v, n)
			if err != nil {
				return err
			}
			out = append(out, info)
		}
		return nil
	})
	return out, next, err
}

// ExternalUpdate describes a change of an external network. Nil fields keep their value.
type ExternalUpdate struct {
	Name        string
	Pools       *[]cloud.AddressRange
	Gateway     *netip.Addr
	Description *string
}

// UpdateExternalNetwork changes the pools, the gateway and the description of an external network.
func (s *Service) UpdateExternalNetwork(
	ctx context.Context, q ExternalUpdate, body [32]byte,
) (Result[ExternalInfo], error) {
	return updateExternalCommand.Call(ctx, s.opts.Commands, externalChange[ExternalUpdate]{body, q})
}

var updateExternalCommand = newExternalCommand("network.external.update", "UpdateExternalNetwork", updateExternal)

// updateExternal implements UpdateExternalNetwork in a transaction of the leader.
func updateExternal(tx *store.Tx, q ExternalUpdate) (out ExternalInfo, err error) {
	n, err := findNamedExternal(tx, q.Name)
	if err != nil {
		return out, err
	}
	if q.Gateway != nil {
		n.Gateway = *q.Gateway
	}
	if q.Description != nil {
		n.Description = *q.Description
	}
	wanted := *n
	if q.Pools != nil {
		wanted.Pools = *q.Pools
	}
	if err := wanted.Check(); err != nil {
		return out, err
	}
	if q.Pools != nil {
		if err := setPools(tx, n, *q.Pools); err != nil {
			return out, err
		}
	}
	n.UpdatedAt = tx.Now()
	externals.Put(tx, n, n.Name)
	return externalInfo(tx, n)
}

// findNamedExternal is findExternal for calls in which the name is required.
func findNamedExternal(r store.Reader, name string) (*cloud.ExternalNetwork, error) {
	if err := cloud.CheckName("name", name); err != nil {
		return nil, err
	}
	return findExternal(r, name)
}

// DeleteExternalNetwork deletes an external network of which no address is assigned.
func (s *Service) DeleteExternalNetwork(ctx context.Context, name string, body [32]byte) (Result[struct{}], error) {
	return deleteExternalCommand.Call(ctx, s.opts.Commands, externalChange[string]{body, name})
}

var deleteExternalCommand = newExternalCommand("network.external.delete", "DeleteExternalNetwork", deleteExternal)

// deleteExternal implements DeleteExternalNetwork in a transaction of the leader.
func deleteExternal(tx *store.Tx, name string) (none struct{}, err error) {
	n, err := findNamedExternal(tx, name)
	if err != nil {
		return none, err
	}
	used, _, err := externalAddresses.List(tx, maxNamedUsers+1, name)
	if err != nil {
		return none, err
	}
	users := make([]string, 0, len(used))
	for _, u := range used {
		users = append(users, u.Value.User)
	}
	gateways, _, err := natOf.List(tx, maxNamedUsers+1, name)
	if err != nil {
		return none, err
	}
	for _, g := range gateways {
		users = append(users, "NAT gateway "+g.Path[1])
	}
	if len(users) > 0 {
		return none, inUse("external network "+name, users)
	}
	if err := forgetAddresses(tx, poolOwner(name)); err != nil {
		return none, err
	}
	// Otherwise an address could be freed while a new network of this name has assigned it.
	rest, err := restingOf(tx, poolOwner(name))
	if err != nil {
		return none, err
	}
	for _, o := range rest {
		resting.Delete(tx, o.Path...)
	}
	externals.Delete(tx, n.Name)
	return none, nil
}
