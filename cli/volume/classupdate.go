package volume

import (
	"context"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
)

func updateClassCommand(s *session.Session) *cobra.Command {
	req, ceph := &storagev1.UpdateStorageClassRequest{}, &storagev1.UpdateRbdPool{}
	var isDefault bool
	var iops, bytes uint64
	var description, keyFile string
	c := classArgCommand(s, "update CLASS", "Change a storage class")
	c.Long = `Change a storage class. A flag that is not given changes nothing. The driver, the pool, the Ceph cluster and the
encryption of a class cannot be changed.

New limits take effect when a volume is next attached, or its VM is next started. Hosts use new monitors, users and keys
for all later connections. Running VMs keep their connections, with the former user and key. Therefore, do not revoke
the former key in the Ceph cluster before these VMs are stopped or their volumes are detached. If an address or the key
is wrong, ` + "`trivet volume show`" + ` shows the error of each volume. Another update corrects the address or the key.`
	c.Example = `  trivet storage-class update fast --max-iops 40000 --description "NVMe"
  trivet storage-class update ceph --monitors 192.0.2.4,192.0.2.5
  ceph auth get-key client.trivet2 | trivet storage-class update ceph --user trivet2 --key-file -`
	p := c.Flags()
	p.BoolVar(&isDefault, "default", false, "use this class for volumes that are created without a class; --default=false removes the default")
	p.Uint64Var(&iops, "max-iops", 0, "limit of each volume on I/O operations a second; 0: none")
	p.Uint64Var(&bytes, "max-bytes-per-second", 0, "limit of each volume on bytes a second; 0: none")
	p.StringVar(&description, "description", "", "text for people, at most 255 bytes")
	p.StringSliceVar(&ceph.Monitors, "monitors", nil, "rbd: IP addresses of all monitors, each with or without a port")
	p.StringVar(&ceph.User, "user", "", "rbd: name of the Ceph user, without the prefix \"client.\"; requires --key-file")
	p.StringVar(&keyFile, "key-file", "", "rbd: file with the key of the user, or - for standard input")
	session.RequireOne(c, "default", "max-iops", "max-bytes-per-second", "description", "monitors", "user", "key-file")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		req.Name = args[0]
		if p.Changed("default") {
			req.IsDefault = &isDefault
		}
		if p.Changed("max-iops") {
			req.MaxIops = &iops
		}
		if p.Changed("max-bytes-per-second") {
			req.MaxBytesPerSecond = &bytes
		}
		if p.Changed("description") {
			req.Description = &description
		}
		if keyFile != "" {
			if ceph.Key, err = readKey(s.Stdin, keyFile); err != nil {
				return err
			}
		} else if ceph.GetUser() != "" {
			return session.Usagef("--key-file is required with --user")
		}
		if !proto.Equal(ceph, &storagev1.UpdateRbdPool{}) {
			req.Rbd = ceph
		}
		class, err := storagev1.NewStorageClassServiceClient(conn).UpdateStorageClass(ctx, req)
		if err != nil {
			return err
		}
		return classes.PrintOne(ctx, s, conn, class)
	})
	return c
}
