package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netns"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

const (
	// rbdUser is the user and the group of the helper trivet-rbd: nobody.
	rbdUser = 65534
	// rbdProbeWithin is how long the helper may take to start.
	rbdProbeWithin = 15 * time.Second
	// maxRBDProblem is the maximum length of the reason why the host does not serve RBD, in bytes.
	maxRBDProblem = 200
)

// rbdOptions returns the options of the helper trivet-rbd.
func (a *agent) rbdOptions() rbd.Options {
	return rbd.Options{Program: a.config.RBDHelper, UID: rbdUser, GID: rbdUser, Log: a.log}
}

// checkRBD returns nil if guests of this host can use RBD images. Otherwise the error says what is missing. If nothing
// is missing, checkRBD installs the packet filter for QEMU (see limitGuests).
func (a *agent) checkRBD(ctx context.Context, host *facts.Host) error {
	if a.config.RBDHelper == "" {
		return fmt.Errorf("rbd_helper is empty: set it to the path of trivet-rbd")
	}
	if !host.QEMU.RBD {
		return fmt.Errorf("QEMU has no block driver rbd: install qemu-block-extra")
	}
	ctx, cancel := context.WithTimeout(ctx, rbdProbeWithin)
	defer cancel()
	cluster := rbd.New(a.rbdOptions(), &rbdv1.ConnectRequest{})
	defer cluster.Close()
	_, err := rbdv1.NewRbdServiceClient(cluster).ListImages(ctx, &rbdv1.ListImagesRequest{})
	if status.Code(err) != codes.InvalidArgument { // A running helper refuses a ConnectRequest without monitors.
		return fmt.Errorf("%s does not start: %s", filepath.Base(a.config.RBDHelper), status.Convert(err).Message())
	}
	first, last, err := a.config.uids()
	if err != nil {
		return err
	}
	if err := limitGuests(ctx, a.config.Network.Prefix, first, last); err != nil {
		return fmt.Errorf("limit the connections of QEMU: %w", err)
	}
	return nil
}

// rbdProblem returns the text of an error of checkRBD for the report to the control plane, or "" if err is nil. The
// text is one line of at most maxRBDProblem bytes.
func rbdProblem(err error) string {
	if err == nil {
		return ""
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	return strings.ToValidUTF8(text[:min(len(text), maxRBDProblem)], "")
}

// limitGuests installs a packet filter for the QEMU processes of this host, whose uids are first to last. On a host
// with RBD, QEMU runs in the network namespace of the agent. QEMU may only open TCP connections to the ports of Ceph's
// monitors (3300 and 6789) and OSDs (6800 to 7568). Trivet's ports 7443 and 7444, which are in this range, are
// excepted. All other packets of QEMU are dropped, including replies to connections that other programs open to QEMU.
func limitGuests(ctx context.Context, prefix string, first, last int) error {
	ns, err := netns.Get()
	if err != nil {
		return fmt.Errorf("open network namespace: %w", err)
	}
	defer ns.Close()
	table := netfilter.Table{Family: "inet", Name: strings.TrimRight(prefix, "-") + "-qemu"}
	_, err = table.Set(ctx, ns, []netfilter.Chain{{
		Name: "output", Kind: "filter", Hook: "output", Policy: "accept", Rules: []string{
			fmt.Sprintf("meta skuid %d-%d tcp dport != { 3300, 6789, 6800-7442, 7445-7568 } drop", first, last),
			fmt.Sprintf("meta skuid %d-%d meta l4proto != tcp drop", first, last),
		},
	}})
	return err
}

// validateRBD returns an error that names an invalid setting of RBD.
func (c *Config) validateRBD() error {
	if c.RBDHelper == "" {
		return nil
	}
	if !filepath.IsAbs(c.RBDHelper) {
		return fmt.Errorf("rbd_helper: %q is not an absolute path", c.RBDHelper)
	}
	return nil
}
