package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	"image/png"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// consoleStory is an open serial console of a VM, over member 2.
type consoleStory struct {
	w      *world
	vm     string
	writer *attached
}

// attached is a stream of AttachConsole with the output that it has received.
type attached struct {
	consolev1.ConsoleService_AttachConsoleClient
	output strings.Builder
	offset int64
}

func attach(ctx context.Context, g *lab.GRPC, r *consolev1.AttachConsoleRequest) (*attached, error) {
	r.OrgId, r.ProjectId = "default", "default"
	stream, err := consolev1.NewConsoleServiceClient(g.Conn()).AttachConsole(ctx)
	if err != nil {
		return nil, err
	}
	if err := stream.Send(r); err != nil {
		return nil, err
	}
	a := &attached{ConsoleService_AttachConsoleClient: stream}
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if !first.GetOpened() {
		return nil, fmt.Errorf("the first message is %v", first)
	}
	return a, nil
}

// read receives data until the output contains text.
func (a *attached) read(text string) error {
	for !strings.Contains(a.output.String(), text) {
		m, err := a.Recv()
		if err != nil {
			return fmt.Errorf("%w; the output is %q", err, a.output.String())
		}
		a.output.Write(m.GetData())
		if m.GetOffset() > 0 {
			a.offset = m.GetOffset()
		}
	}
	return nil
}

func (a *attached) typed(text string) error {
	return a.Send(&consolev1.AttachConsoleRequest{Data: []byte(text)})
}

func errorReason(err error) string {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// openConsoles opens the serial console of a VM for two users, takes a picture of its display, and opens the display
// over a websocket. The serial console of the first user stays open.
func openConsoles(ctx context.Context, t *testing.T, w *world, vm string) *consoleStory {
	s := &consoleStory{w: w, vm: vm}
	token := w.tenant("carl", "default", "default", "project:member")
	carl := w.dial(2, token)
	s.serial(ctx, t, carl)
	s.picture(ctx, t, carl)
	s.websocket(ctx, t, token)
	s.audited(ctx, t)
	s.revoked(ctx, t, token, carl)
	return s
}

// serial checks that both users see the answer of the guest, that only one may write, and that the second one can take
// the console over.
func (s *consoleStory) serial(ctx context.Context, t *testing.T, carl *lab.GRPC) {
	first, err := attach(ctx, carl, &consolev1.AttachConsoleRequest{VmId: s.vm})
	require.NoError(t, err)
	watcher, err := attach(ctx, s.w.admin, &consolev1.AttachConsoleRequest{VmId: s.vm, ReadOnly: true})
	require.NoError(t, err)
	require.NoError(t, watcher.typed("reboot\n"), "what a watcher types must not reach the guest")
	require.NoError(t, first.typed("run echo out-$((40+2))\n"))
	require.NoError(t, first.read("out-42"))
	require.NoError(t, watcher.read("out-42"))

	_, err = attach(ctx, s.w.admin, &consolev1.AttachConsoleRequest{VmId: s.vm})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	require.Equal(t, "CONSOLE_IN_USE", errorReason(err))
	s.writer, err = attach(ctx, s.w.dial(2, s.w.adminToken), &consolev1.AttachConsoleRequest{VmId: s.vm, TakeOver: true})
	require.NoError(t, err)
	err = first.read("never")
	require.Equal(t, "CONSOLE_TAKEN_OVER", errorReason(err), "%v", err)
	require.NoError(t, s.writer.typed("run echo out-$((40+3))\n"))
	require.NoError(t, s.writer.read("out-43"))
	require.NoError(t, watcher.read("out-43"))
	require.NoError(t, watcher.CloseSend())
	_, err = watcher.Recv()
	require.ErrorIs(t, err, io.EOF)
}

// picture checks that the picture of the display has the text mode of a PC's firmware, with light pixels of text on a
// dark screen.
func (s *consoleStory) picture(ctx context.Context, t *testing.T, carl *lab.GRPC) {
	stream, err := consolev1.NewConsoleServiceClient(carl.Conn()).ReadScreenshot(ctx, &consolev1.ReadScreenshotRequest{
		OrgId: "default", ProjectId: "default", VmId: s.vm,
	})
	require.NoError(t, err)
	var file bytes.Buffer
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		file.Write(m.GetData())
	}
	picture, err := png.Decode(&file)
	require.NoError(t, err)
	light := lightPixels(picture)
	all := picture.Bounds().Dx() * picture.Bounds().Dy()
	require.Equal(t, image.Pt(720, 400), picture.Bounds().Size())
	require.Greater(t, light, 200, "the picture has no text")
	require.Less(t, light, all/2)
}

func lightPixels(p image.Image) (n int) {
	for y := p.Bounds().Min.Y; y < p.Bounds().Max.Y; y++ {
		for x := p.Bounds().Min.X; x < p.Bounds().Max.X; x++ {
			if r, g, b, _ := p.At(x, y).RGBA(); r > 0x8000 && g > 0x8000 && b > 0x8000 {
				n++
			}
		}
	}
	return n
}

// websocket opens the display with a ticket, as a browser does, and does the handshake of the VNC protocol. The ticket
// must not be accepted a second time.
func (s *consoleStory) websocket(ctx context.Context, t *testing.T, token string) {
	made, err := s.w.rest(2, token).Do(ctx, 8084, http.MethodPost, "/api/v1/vms/"+s.vm+"/console", map[string]any{"kind": "vnc"})
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, made.Status, made.Raw)
	var ticket struct {
		Path string `json:"path"`
	}
	require.NoError(t, json.Unmarshal(made.Data, &ticket))
	url := fmt.Sprintf("ws://%s:8084%s", s.w.rest(3, "").Host, ticket.Path)
	conn, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{Subprotocols: []string{"binary"}})
	require.NoError(t, err)
	defer conn.CloseNow()
	require.Equal(t, "binary", conn.Subprotocol())
	screen := websocket.NetConn(ctx, conn, websocket.MessageBinary)
	read := func(n int) []byte {
		data := make([]byte, n)
		_, err := io.ReadFull(screen, data)
		require.NoError(t, err)
		return data
	}
	write := func(text string) {
		_, err := io.WriteString(screen, text)
		require.NoError(t, err)
	}
	require.Equal(t, "RFB 003.008\n", string(read(12)))
	write("RFB 003.008\n")
	require.Equal(t, []byte{1, 1}, read(2), "the only security type must be None")
	write("\x01")
	require.Equal(t, []byte{0, 0, 0, 0}, read(4))
	write("\x01")
	require.Equal(t, []byte{0x02, 0xd0, 0x01, 0x90}, read(24)[:4], "the display must have 720x400 pixels")

	_, again, err := websocket.Dial(ctx, url, nil)
	require.Error(t, err)
	require.Equal(t, http.StatusUnauthorized, again.StatusCode)
}

// audited checks that the sessions and the ticket are in the audit.
func (s *consoleStory) audited(ctx context.Context, t *testing.T) {
	for method, want := range map[string]int{"AttachConsole": 4, "CreateConsoleTicket": 1} {
		require.NoError(t, lab.Until(ctx, "the audit has "+method, func(ctx context.Context) error {
			list, err := s.w.admin.Identity.ListAuditRecords(ctx, &identityv1.ListAuditRecordsRequest{Method: method, PageSize: 100})
			if err != nil {
				return err
			}
			done := 0
			for _, r := range list.GetRecords() {
				if r.GetOutcome() == "OK" && strings.Contains(r.GetTarget(), s.vm) {
					done++
				}
			}
			if done != want {
				return fmt.Errorf("%d records of %s: %v", done, method, list.GetRecords())
			}
			return nil
		}))
	}
}

// revoked checks that a console ends when the token of its user is revoked.
func (s *consoleStory) revoked(ctx context.Context, t *testing.T, token string, carl *lab.GRPC) {
	watcher, err := attach(ctx, carl, &consolev1.AttachConsoleRequest{VmId: s.vm, ReadOnly: true})
	require.NoError(t, err)
	_, err = carl.Identity.RevokeToken(ctx, &identityv1.RevokeTokenRequest{Token: token})
	require.NoError(t, err)
	bounded, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- watcher.read("never") }()
	select {
	case err := <-ended:
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
	case <-bounded.Done():
		t.Fatal("the console of a revoked token is open")
	}
}

// continueAfterRestart checks that the console that was open when the agent was killed has ended with UNAVAILABLE, and
// that a user who opens it again gets the output from where it ended, and can write.
func (s *consoleStory) continueAfterRestart(ctx context.Context, t *testing.T) {
	err := s.writer.read("never")
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	require.NoError(t, lab.Until(ctx, "the console can be opened again", func(ctx context.Context) error {
		again, err := attach(ctx, s.w.dial(2, s.w.adminToken), &consolev1.AttachConsoleRequest{VmId: s.vm, FromOffset: &s.writer.offset})
		if err != nil {
			return err
		}
		if err := again.typed("run echo out-$((40+4))\n"); err != nil {
			return err
		}
		return again.read("out-44")
	}))
}
