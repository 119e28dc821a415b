package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"
)

func screenshotCommand(s *session.Session) *cobra.Command {
	c := vmArgCommand(s, "screenshot VM FILE", "Write a picture of a VM's display to a PNG file")
	c.Args = session.Exactly("VM", "FILE")
	c.Long = `Write a picture of the display of a running VM to a PNG file. An existing file is replaced. - writes to standard output.`
	c.RunE = s.Run(callTimeout+waitMargin, func(ctx context.Context, conn *dial.Conn, args []string) error {
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		stream, err := consolev1.NewConsoleServiceClient(conn).ReadScreenshot(ctx, &consolev1.ReadScreenshotRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id,
		})
		if err != nil {
			return err
		}
		var picture []byte
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			picture = append(picture, m.GetData()...)
		}
		if args[1] == "-" {
			_, err := s.Stdout.Write(picture)
			return err
		}
		if err := os.WriteFile(args[1], picture, 0o600); err != nil {
			return fmt.Errorf("write the picture: %w", err)
		}
		return s.Done(args[1], "written")
	})
	return c
}

func vncCommand(s *session.Session) *cobra.Command {
	var listen string
	c := vmArgCommand(s, "vnc VM", "Make a VM's display available to VNC viewers on a local port")
	c.Long = `Listen on a local port and forward VNC connections to the display, keyboard and mouse of a running VM. The command runs
until you interrupt it. Viewers need no password, so every user of this computer can connect to the port while the command
runs.`
	c.Example = `  trivet vm vnc web --listen 127.0.0.1:5900`
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "address and port; port 0 is a free one, which the command prints")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
		if err != nil {
			return fmt.Errorf("listen for viewers: %w", err)
		}
		defer listener.Close()
		if host, ok := listener.Addr().(*net.TCPAddr); ok && !host.IP.IsLoopback() {
			s.Note("other computers can reach %s, and viewers need no password", host)
		}
		if _, err := fmt.Fprintf(s.Stdout, "vnc://%s\n", listener.Addr()); err != nil {
			return err
		}
		d := &display{s: s, conn: conn, first: &consolev1.AttachConsoleRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id, Kind: consolev1.ConsoleKind_CONSOLE_KIND_VNC,
		}}
		return session.Interruptible(ctx, d.serve(ctx, listener))
	})
	return c
}

// display serves VNC viewers.
type display struct {
	s     *session.Session
	first *consolev1.AttachConsoleRequest

	mu   sync.Mutex // held while a stream is opened
	conn *dial.Conn
}

// serve connects each viewer that the listener accepts to the display, until ctx ends.
func (d *display) serve(ctx context.Context, listener net.Listener) error {
	var viewers sync.WaitGroup
	defer viewers.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	for {
		viewer, err := listener.Accept()
		if err != nil {
			return err
		}
		viewers.Go(func() {
			defer viewer.Close()
			if err := d.connect(ctx, viewer); err != nil && ctx.Err() == nil {
				d.s.Note("the connection of a viewer has ended: %s", status.Convert(err).Message())
			}
		})
	}
}

// viewerTime is the maximum time in which a viewer must read what was sent to it.
const viewerTime = time.Minute

// connect copies data between a viewer and the display until one of them ends.
func (d *display) connect(ctx context.Context, viewer net.Conn) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d.mu.Lock()
	stream, err := consolev1.NewConsoleServiceClient(d.conn).AttachConsole(ctx)
	d.mu.Unlock()
	if err != nil {
		return err
	}
	if err := stream.Send(d.first); err != nil && !errors.Is(err, io.EOF) { // after io.EOF, Recv returns the reason
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = viewer.Close() })
	defer stop()
	var typing sync.WaitGroup
	defer typing.Wait()
	defer viewer.Close()
	for first := true; ; first = false {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled { // Canceled: the viewer has closed its connection
			return nil
		}
		if err != nil {
			return err
		}
		if first {
			typing.Go(func() {
				defer cancel()
				buf := make([]byte, maxInput)
				for {
					n, err := viewer.Read(buf)
					if n > 0 && stream.Send(&consolev1.AttachConsoleRequest{Data: buf[:n:n]}) != nil || err != nil {
						return
					}
				}
			})
		}
		if err := viewer.SetWriteDeadline(time.Now().Add(viewerTime)); err != nil {
			return nil // the viewer has closed its connection
		}
		if _, err := viewer.Write(m.GetData()); err != nil {
			return nil
		}
	}
}
