package volume

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// ClassCommand returns the command `trivet storage-class`.
func ClassCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "storage-class", Short: "Describe the storage in which volumes are made", Args: cobra.NoArgs,
		Long: `A storage class describes where and how volumes are stored. A class of the driver MANAGED names a storage pool
in the configuration of the hosts. A class of the driver RBD names a pool of a Ceph cluster. Creating, changing and
deleting a class requires the role system:admin.`,
		Example: `  trivet storage-class create fast --pool nvme --max-iops 20000
  trivet storage-class update fast --max-iops 40000
  trivet storage-class create ceph --driver rbd --fsid 2f1c… --monitors 192.0.2.1,192.0.2.2 --pool vms --user trivet --key-file key
  trivet storage-class list`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createClassCommand(s), listClassesCommand(s), showClassCommand(s), updateClassCommand(s), defaultClassCommand(s), deleteClassCommand(s))
	return c
}

func createClassCommand(s *session.Session) *cobra.Command {
	req, ceph := &storagev1.CreateStorageClassRequest{}, &storagev1.RbdPool{}
	var driver, keyFile string
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a storage class", Args: session.Exactly("NAME"),
		Example: `  trivet storage-class create fast --pool nvme --default
  trivet storage-class create secret --pool nvme --encrypted
  ceph auth get-key client.trivet | trivet storage-class create ceph --driver rbd --fsid $(ceph fsid) \
      --monitors 192.0.2.1,192.0.2.2 --pool vms --user trivet --key-file -`,
	}
	p := c.Flags()
	p.StringVar(&driver, "driver", "managed", "managed or rbd")
	p.StringVar(&req.Pool, "pool", "", "name of the storage pool in the configuration of the hosts, or of the Ceph pool")
	p.StringVar(&ceph.Fsid, "fsid", "", "rbd: ID of the Ceph cluster")
	p.StringSliceVar(&ceph.Monitors, "monitors", nil, "rbd: IP addresses of the monitors, each with or without a port")
	p.StringVar(&ceph.User, "user", "", "rbd: name of the Ceph user, without the prefix \"client.\"")
	p.StringVar(&keyFile, "key-file", "", "rbd: file with the key of the user, or - for standard input")
	p.BoolVar(&req.IsDefault, "default", false, "use this class for volumes that are created without a class")
	p.Uint64Var(&req.MaxIops, "max-iops", 0, "limit of each volume on I/O operations a second (default: none)")
	p.Uint64Var(&req.MaxBytesPerSecond, "max-bytes-per-second", 0, "limit of each volume on bytes a second (default: none)")
	p.BoolVar(&req.Encrypted, "encrypted", false, "encrypt each volume with its own key")
	p.StringVar(&req.Description, "description", "", "text for people, at most 255 bytes")
	session.Require(c, "pool")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if err := cloud.CheckName("NAME", args[0]); err != nil {
			return session.Usagef("%v", err)
		}
		req.Name = args[0]
		switch driver {
		case "managed":
			req.Driver = vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED
		case "rbd":
			key, err := readKey(s.Stdin, keyFile)
			if err != nil {
				return err
			}
			ceph.Pool, ceph.Key = req.Pool, key
			req.Driver, req.Pool, req.Rbd = vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_RBD, "", ceph
		default:
			return session.Usagef("--driver: %q is neither managed nor rbd", driver)
		}
		class, err := storagev1.NewStorageClassServiceClient(conn).CreateStorageClass(ctx, req)
		if err != nil {
			return err
		}
		return classes.PrintOne(ctx, s, conn, class)
	})
	return c
}

// readKey reads the key of a Ceph user from a file, or from in if the path is "-".
func readKey(in io.Reader, path string) (string, error) {
	if path == "" {
		return "", session.Usagef("--key-file is required for the driver rbd")
	}
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return "", fmt.Errorf("read the key: %w", err)
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, 4<<10))
	if err != nil {
		return "", fmt.Errorf("read the key: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

func listClassesCommand(s *session.Session) *cobra.Command {
	return classes.Command(s, &cobra.Command{Use: "list", Short: "List the storage classes"}, callTimeout)
}

// classes describes storage classes for lists.
var classes = &list.Kind[*storagev1.StorageClass]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*storagev1.StorageClass, string, error) {
		page, err := storagev1.NewStorageClassServiceClient(conn).ListStorageClasses(ctx, &storagev1.ListStorageClassesRequest{
			PageSize: q.Size, PageToken: q.Token,
		})
		return page.GetStorageClasses(), page.GetNextPageToken(), err
	},
	Name: (*storagev1.StorageClass).GetName,
	Columns: func(context.Context, *session.Session, *dial.Conn) []list.Column[*storagev1.StorageClass] {
		type class = *storagev1.StorageClass
		yesNo := map[bool]string{true: "yes", false: "no"}
		limit := func(name string, of func(class) uint64) list.Column[class] {
			c := list.Number(name, of)
			c.Text = func(o class) string {
				if of(o) == 0 {
					return "" // no limit
				}
				return strconv.FormatUint(of(o), 10)
			}
			return c
		}
		rate := limit("MAX BYTES/S", class.GetMaxBytesPerSecond)
		rate.Table = func(c class) string {
			if c.GetMaxBytesPerSecond() == 0 {
				return ""
			}
			return show.Bytes(c.GetMaxBytesPerSecond())
		}
		return []list.Column[class]{
			{Name: "NAME", Text: class.GetName},
			{Name: "DRIVER", Text: func(c class) string { return show.Enum("VOLUME_DRIVER_KIND", c.GetDriver()) }},
			{Name: "POOL", Text: func(c class) string { return cmp.Or(c.GetRbd().GetPool(), c.GetPool()) }, Max: 16},
			{Name: "DEFAULT", Text: func(c class) string { return yesNo[c.GetIsDefault()] }},
			{Name: "ENCRYPTED", Text: func(c class) string { return yesNo[c.GetEncrypted()] }, In: list.InWide},
			limit("MAX IOPS", class.GetMaxIops),
			rate,
			{Name: "DESCRIPTION", Text: class.GetDescription, In: list.InWide},
		}
	},
}

func showClassCommand(s *session.Session) *cobra.Command {
	c := classArgCommand(s, "show CLASS", "Show a storage class")
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		class, err := storagev1.NewStorageClassServiceClient(conn).GetStorageClass(ctx, &storagev1.GetStorageClassRequest{Name: name})
		if err != nil {
			return err
		}
		return classes.PrintOne(ctx, s, conn, class)
	})
	return c
}

func defaultClassCommand(s *session.Session) *cobra.Command {
	c := classArgCommand(s, "set-default CLASS", "Make a storage class the default")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		class, err := storagev1.NewStorageClassServiceClient(conn).UpdateStorageClass(ctx, &storagev1.UpdateStorageClassRequest{
			Name: args[0], IsDefault: proto.Bool(true),
		})
		if err != nil {
			return err
		}
		return classes.PrintOne(ctx, s, conn, class)
	})
	return c
}

func deleteClassCommand(s *session.Session) *cobra.Command {
	c := classArgCommand(s, "delete CLASS", "Delete a storage class without volumes")
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		if _, err := storagev1.NewStorageClassServiceClient(conn).DeleteStorageClass(ctx, &storagev1.DeleteStorageClassRequest{
			Name: name,
		}); err != nil {
			return err
		}
		return s.Done(name, "deleted")
	})
	return c
}

// classArgCommand returns a command with the single argument CLASS, and shell completion for it.
func classArgCommand(s *session.Session, use, short string) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: session.Exactly("CLASS")}
	c.ValidArgsFunction = session.FirstArg(classes.Names(s))
	return c
}
