// Package network manages the networks of projects: VPCs, subnets, ports, security groups, route tables, NAT gateways,
// floating IPs, service IPs and peerings. It keeps their records and assigns their addresses. The hosts build the
// networks; this package does not know how. The main type is Service.
//
// Each call that changes something is one transaction of the leader, at most once per idempotency key. The transaction
// checks everything that the change depends on, including quotas and the resources that the request refers to. So a
// failed call changes nothing, and two calls at the same time cannot assign one address twice.
//
// Decisions:
//   - All records of a resource have the ID of the project in their path. A request therefore finds only resources of
//     its own project: a resource of another project is NotFound, also where the request refers to it.
//   - An address or MAC that a request leaves out is chosen here: the lowest free IPv4 address, a MAC derived from the
//     port's ID, and an IPv6 address derived from the MAC. Package ipam has the bitmaps of assigned addresses, one set
//     per subnet. The network, gateway and broadcast addresses are assigned when the subnet is created.
//   - A released address is assigned again only after RestTime, so that packets to the former port do not reach the new
//     one.
//   - A security group has an index of the ports that use it and of the groups whose rules refer to it. Deletions read
//     these indexes instead of all ports and groups.
//   - The tables whose records hosts need have names that begin with net-, so that Feed can watch all of them in one
//     order. Feed is in this package because it reads these tables and sends the messages of the network API.
//   - A NAT gateway is on one host at a time if it has an address of its own or is not the default of its VPC. So is a
//     floating IP of a service IP. Feed.AssignGateways chooses the host. A gateway leaves a connected host only after
//     this host has acknowledged the withdrawal, so that two connected hosts never answer for one address.
//     Feed.AssignGateways does not wait for a host that has sent no heartbeat for cloud.HeartbeatTimeout: such a host
//     has withdrawn the address after cloud.AddressLease.
//   - VXLAN network identifiers (VNIs) are assigned in ascending order and start again at 1 after the last, so that an
//     identifier is not used again soon after its subnet or NAT gateway was deleted.
package network

import (
	"context"
	"log/slog"
	"strings"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Options configures New. All fields are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Log      *slog.Logger
}

// Service implements the network service of one member.
type Service struct{ opts Options }

// New creates the service and registers the commands that other members forward to the leader.
func New(opts Options) *Service {
	s := &Service{opts}
	leader.Register(opts.Commands, s,
		createVPCCommand, updateVPCCommand, deleteVPCCommand,
		createSubnetCommand, updateSubnetCommand, deleteSubnetCommand,
		createPortCommand, updatePortCommand, deletePortCommand,
		createGroupCommand, updateGroupCommand, deleteGroupCommand, addRuleCommand, removeRuleCommand,
		createTableCommand, updateTableCommand, deleteTableCommand, createNATCommand, updateNATCommand,
		deleteNATCommand,
		createFloatingCommand, updateFloatingCommand, deleteFloatingCommand,
		createServiceCommand, updateServiceCommand, deleteServiceCommand,
		createPeeringCommand, acceptPeeringCommand, updatePeeringCommand, deletePeeringCommand,
		createExternalCommand, updateExternalCommand, deleteExternalCommand)
	return s
}

// Result is the result of a call that creates, changes or deletes a resource. Replayed means that an earlier call with
// the same idempotency key made the change.
type Result[T any] struct {
	Value    T
	Replayed bool
}

// change is the request of a command. Body is the hash of the caller's request; it is stored with the idempotency key.
type change[Q any] struct {
	Tenant  cloud.Tenant
	Body    [32]byte
	Request Q
}

// newCommand returns the command that runs a function in one transaction of the leader. method is the name of the RPC,
// under which the response is stored for repeated calls.
func newCommand[Q, T any](
	name, method string, run func(*store.Tx, cloud.Tenant, Q) (T, error),
) *leader.Command[*Service, change[Q], Result[T]] {
	return leader.NewCommand(name, leader.Keyed, func(s *Service, ctx context.Context, c change[Q]) (out Result[T], err error) {
		_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			out.Value, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(c.Tenant.Project), method, c.Body, func() (T, error) {
				return run(tx, c.Tenant, c.Request)
			})
			return err
		})
		return out, err
	})
}

// newID returns a new ID. IDs that are created later are greater, so lists are in the order of creation.
func newID() (string, error) {
	id, err := uuid.NewV7()
	return id.String(), err
}

// inUse returns the FailedPrecondition fault for the deletion of a resource that others use. users are up to
// maxNamedUsers+1 labels of them, such as "port web (0192…)".
func inUse(resource string, users []string) error {
	text := strings.Join(users[:min(len(users), maxNamedUsers)], ", ")
	if len(users) > maxNamedUsers {
		text += " and others"
	}
	return fault.New(fault.FailedPrecondition, "%s is used by %s", resource, text).WithReason("IN_USE")
}

// maxNamedUsers is the maximum number of users that the error of a deletion names.
const maxNamedUsers = 5

func notFound(kind, id string) error { return fault.New(fault.NotFound, "no %s %s", kind, id) }

// get returns the record of a project at an ID from a linearizable read. field is the name of the ID in requests, kind
// that of the resource in errors.
func get[T any](
	ctx context.Context, s *Service, table store.Table[T], kind, field string, t cloud.Tenant, id string,
) (out *T, err error) {
	if err := cloud.CheckUUID(field, id); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		out, err = find(v, table, kind, t, id)
		return err
	})
	return out, err
}

// find returns the record of a project at an ID, or NotFound.
func find[T any](r store.Reader, table store.Table[T], kind string, t cloud.Tenant, id string) (*T, error) {
	out, err := table.Get(r, string(t.Project), id)
	if err == nil && out == nil {
		return nil, notFound(kind, id)
	}
	return out, err
}
