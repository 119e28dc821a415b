package netdev

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// kernel changes one VPC's namespace. It exists during one call, on a thread in this namespace.
type kernel struct {
	ctx       context.Context // of the call
	vpc       *netlink.Handle
	root      *netlink.Handle // of the underlay's namespace
	namespace netns.NsHandle  // of the VPC
	indexes   map[string]int  // of devices of the namespace, by name; not all of them

	// sockets holds the netlink sockets that request uses, by protocol.
	sockets map[int]*nl.SocketHandle
}

// enter calls f on a thread in the namespace of a VPC.
func (h *Host) enter(ctx context.Context, id cloud.VPCID, f func(*kernel) error) error {
	ns, err := netns.GetFromPath(h.Path(id))
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", h.Namespace(id), err)
	}
	defer ns.Close()
	return nsthread.In(ns, func() error {
		k, err := newKernel(ctx, ns)
		if err != nil {
			return err
		}
		defer k.close()
		k.root = h.root
		return f(k)
	})
}

// newKernel returns a kernel for the namespace of the thread.
func newKernel(ctx context.Context, ns netns.NsHandle) (*kernel, error) {
	handle, err := openHandle(netns.None())
	if err != nil {
		return nil, err
	}
	socket, err := openSocket()
	if err != nil {
		handle.Close()
		return nil, err
	}
	return &kernel{
		ctx: ctx, vpc: handle, namespace: ns, indexes: map[string]int{},
		sockets: map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}},
	}, nil
}

func (k *kernel) close() {
	k.vpc.Close()
	for _, s := range k.sockets {
		s.Close()
	}
}

// openSocket opens a socket for kernel.request in the namespace of the thread.
func openSocket() (*nl.NetlinkSocket, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	timeout := unix.NsecToTimeval(requestTimeout.Nanoseconds())
	if err := errors.Join(socket.SetSendTimeout(&timeout), socket.SetReceiveTimeout(&timeout)); err != nil {
		socket.Close()
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return socket, nil
}

// apply makes the changes and returns those that it made. It skips the changes of ports whose devices have disappeared,
// and returns their names: a tap disappears when its VM ends.
func (k *kernel) apply(changes []Change, want *state) (done []Change, vanished []string, err error) {
	gone := map[string]bool{}
	for _, c := range changes {
		if gone[c.target()] {
			continue
		}
		if err := k.ctx.Err(); err != nil {
			return done, vanished, err
		}
		err := c.apply(k)
		if err != nil && want.links[c.target()].kind == portLink && !k.exists(c.target()) {
			gone[c.target()] = true
			vanished = append(vanished, c.target())
			continue
		}
		if err != nil {
			return done, vanished, fmt.Errorf("%s: %w", c, err)
		}
		done = append(done, c)
	}
	return done, vanished, nil
}

// index returns the index of a device.
func (k *kernel) index(name string) (int, error) {
	if i, known := k.indexes[name]; known {
		return i, nil
	}
	l, err := k.vpc.LinkByName(name)
	if err != nil {
		return 0, err
	}
	k.indexes[name] = l.Attrs().Index
	return l.Attrs().Index, nil
}

func (k *kernel) exists(name string) bool {
	_, err := k.vpc.LinkByName(name)
	return err == nil
}

// withLink calls f with a link that has only the index of the named device, which is all that requests need.
func (k *kernel) withLink(name string, f func(netlink.Link) error) error {
	index, err := k.index(name)
	if err != nil {
		return err
	}
	return f(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}})
}

// request sends a request for which the netlink package has no function.
func (k *kernel) request(kind, flags int, data ...nl.NetlinkRequestData) ([][]byte, error) {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Sockets = k.sockets
	for _, d := range data {
		r.AddData(d)
	}
	return r.Execute(unix.NETLINK_ROUTE, 0)
}

// createVXLAN creates a VXLAN device in the VPC's namespace through the underlay's, in which its socket then is.
//
// A VNI can be used once in the underlay's namespace. If a VPC's namespace was removed by hand, the kernel deletes its
// devices a little later. createVXLAN waits for it.
func (k *kernel) createVXLAN(c addVXLAN) error {
	deadline := time.Now().Add(releaseTimeout)
	for {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Namespace = c.name, c.mtu, netlink.NsFd(k.namespace)
		err := k.root.LinkAdd(&netlink.Vxlan{
			LinkAttrs: attrs, VxlanId: int(c.vni), SrcAddr: c.vtep.AsSlice(), VtepDevIndex: c.device, Port: int(c.port),
		})
		if !errors.Is(err, unix.EEXIST) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-time.After(releasePoll):
		case <-k.ctx.Done():
			return errors.Join(err, k.ctx.Err())
		}
	}
}

// deleteGroup is the number of the group of devices that deleteLinks uses.
const deleteGroup = 0x74726976

// deleteLinks deletes devices with one request, for which the kernel waits once. Devices that do not exist are no
// error.
func (k *kernel) deleteLinks(names []string) error {
	found := 0
	for _, name := range names {
		l, err := k.vpc.LinkByName(name)
		if err == nil {
			err = k.vpc.LinkSetGroup(l, deleteGroup)
		}
		delete(k.indexes, name)
		switch {
		case errors.As(err, new(netlink.LinkNotFoundError)), errors.Is(err, unix.ENODEV):
		case err != nil:
			return fmt.Errorf("mark %s for deletion: %w", name, err)
		default:
			found++
		}
	}
	if found == 0 {
		return nil
	}
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	group := nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(deleteGroup))
	_, err := k.request(unix.RTM_DELLINK, unix.NLM_F_ACK, message, group)
	if errors.Is(err, unix.ENODEV) { // all disappeared meanwhile
		return nil
	}
	return err
}
