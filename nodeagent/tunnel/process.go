package tunnel

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/filelock"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// Descriptors that the tunnel process inherits.
const (
	fdQEMU   = 3 // pidfd of the VM's QEMU
	fdMemory = 4 // socket of the stream Memory; only for a target without Channels
)

// Main runs a tunnel process and returns its exit code. It reads a Config from standard input. When the process
// listens, Main writes its State to standard output. If the process fails, Main writes the text of the error instead.
func Main() int {
	ctx, cancel := context.WithTimeout(context.Background(), maxLife)
	defer cancel()
	if err := run(ctx); err != nil {
		_, _ = os.Stdout.WriteString(err.Error())
		return 1
	}
	return 0
}

// process is a running tunnel process.
type process struct {
	Config
	tls *tls.Config

	// memory is the target's socket for the stream Memory, or nil if there are Channels.
	memory net.Conn
	// mainConnected is closed when the target's stream Memory is connected to QEMU.
	mainConnected chan struct{}
	// end ends the process.
	end context.CancelFunc

	mu   sync.Mutex
	open map[string]bool // names of the streams that were opened once; they cannot be opened again
	// waiting has, for each memory stream, the newest connection on which no byte has arrived yet. A memory stream is
	// not in open before its first byte has arrived.
	waiting map[string]net.Conn
}

func run(ctx context.Context) error {
	p := &process{open: map[string]bool{}, waiting: map[string]net.Conn{}, mainConnected: make(chan struct{})}
	if err := json.NewDecoder(io.LimitReader(os.Stdin, 1<<20)).Decode(&p.Config); err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	var err error
	if p.tls, err = p.tlsConfig(); err != nil {
		return err
	}
	state := State{Role: p.Role, VM: p.VM, Attempt: p.Attempt, PID: os.Getpid(), Channels: p.Channels}
	listener, err := p.listen(&state)
	if err != nil {
		return err
	}
	defer listener.Close()
	ctx, p.end = context.WithCancel(ctx)
	defer p.end()
	if p.Role == Source && p.Channels > 0 {
		memory, err := p.listenMemory()
		if err != nil {
			return fmt.Errorf("listen for QEMU: %w", err)
		}
		defer memory.Close()
		go p.acceptMemory(ctx, memory)
	}
	text, err := json.Marshal(state)
	if err != nil {
		return err
	}
	// The file stays locked until this process ends.
	lock, err := os.OpenFile(filepath.Join(p.Dir, stateFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := filelock.Lock(lock, time.Second); err != nil {
		return fmt.Errorf("another tunnel process of this VM is running: %w", err)
	}
	if err := lock.Truncate(0); err != nil {
		return err
	}
	if _, err := lock.WriteAt(append(text, '\n'), 0); err != nil {
		return err
	}
	if _, err := os.Stdout.Write(text); err != nil {
		return err
	}
	_ = os.Stdout.Close()
	go func() { defer p.end(); waitQEMU(ctx) }()
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	p.serve(ctx, listener)
	return nil
}

// waitQEMU returns when the process of fdQEMU has ended, or when ctx ends.
func waitQEMU(ctx context.Context) {
	for ctx.Err() == nil {
		n, err := unix.Poll([]unix.PollFd{{Fd: fdQEMU, Events: unix.POLLIN}}, int(time.Second.Milliseconds()))
		if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func (p *process) tlsConfig() (*tls.Config, error) {
	leaf, err := x509.ParseCertificate(p.Identity.Certificate)
	if err != nil {
		return nil, fmt.Errorf("parse certificate: %w", err)
	}
	authority, err := x509.ParseCertificate(p.Identity.Authority)
	if err != nil {
		return nil, fmt.Errorf("parse authority: %w", err)
	}
	key, err := x509.ParsePKCS8PrivateKey(p.Identity.Key)
	if err != nil {
		return nil, fmt.Errorf("parse key: %w", err)
	}
	own := &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}
	return mtls.Hosts(func() (*tls.Certificate, error) { return own, nil }, authority, mtls.OnlyNode(p.Peer)), nil
}

// listen opens the listener of a source or a target. For a target, it sets s.Address.
func (p *process) listen(s *State) (net.Listener, error) {
	if p.Role == Source {
		return listenUnix(p.Dir, sourceSocket)
	}
	var err error
	if p.Channels == 0 {
		inherited := os.NewFile(fdMemory, "memory")
		p.memory, err = net.FileConn(inherited)
		_ = inherited.Close() // QEMU sees the end of the stream only when no descriptor of the socket is left.
		if err != nil {
			return nil, fmt.Errorf("open the socket of QEMU: %w", err)
		}
	}
	for port := int(p.FirstPort); port <= int(p.LastPort); port++ {
		l, listenErr := net.Listen("tcp", net.JoinHostPort(p.Address, strconv.Itoa(port)))
		if listenErr == nil {
			s.Address = l.Addr().String()
			return l, nil
		}
		if err = listenErr; !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("listen for the source: %w", err)
}

// maxHandshakes is the maximum number of connections whose stream is not open yet.
const maxHandshakes = 32

// handshakes has the connections whose stream is not open yet, the oldest first.
type handshakes struct {
	mu  sync.Mutex
	all []net.Conn
}

// add adds a connection. If there are too many, add closes the oldest one from the address that has the most. A program
// on another host can therefore not close the connections of the peer, however many it opens.
func (h *handshakes) add(conn net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, conn)
	if len(h.all) <= maxHandshakes {
		return
	}
	number := map[string]int{}
	for _, one := range h.all {
		number[hostOf(one)]++
	}
	victim := h.all[0]
	for _, one := range h.all[1:] {
		if number[hostOf(one)] > number[hostOf(victim)] {
			victim = one
		}
	}
	_ = victim.Close()
	h.all = slices.DeleteFunc(h.all, func(c net.Conn) bool { return c == victim })
}

// hostOf returns the address of a connection's client without the port.
func hostOf(conn net.Conn) string {
	host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		return conn.RemoteAddr().String()
	}
	return host
}

func (h *handshakes) remove(conn net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = slices.DeleteFunc(h.all, func(c net.Conn) bool { return c == conn })
}

// serve accepts connections and copies the data of their streams until the listener is closed.
func (p *process) serve(ctx context.Context, l net.Listener) {
	var opening handshakes
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return // The open streams are closed when the process ends.
			}
			time.Sleep(50 * time.Millisecond)
			continue
		}
		opening.add(conn)
		go func() {
			defer conn.Close()
			s, err := p.openStream(ctx, conn, func() { opening.remove(conn) })
			opening.remove(conn)
			switch {
			case err != nil:
			case s.memory:
				if one, err := p.awaitMemory(s.name, s.one); err == nil {
					p.receiveMemory(ctx, s.name, one)
				}
			default:
				_ = relay(s.one, s.other)
			}
		}()
	}
}

// stream is an open stream: two connections between which data must be copied. If memory is true, the stream is a memory
// stream at a target, and other is nil: the caller must call awaitMemory and connectMemory.
type stream struct {
	name       string
	memory     bool
	one, other duplex
}

// openStream reads the request of a new connection and opens the stream. It calls verified when the client has proved at
// the target that it is the peer.
func (p *process) openStream(ctx context.Context, conn net.Conn, verified func()) (s stream, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	_ = conn.SetDeadline(time.Now().Add(openTimeout))
	if p.Role == Source {
		s, err = p.openAtSource(ctx, conn.(*net.UnixConn))
	} else {
		s, err = p.openAtTarget(ctx, conn, verified)
	}
	_ = conn.SetDeadline(time.Time{})
	return s, err
}

// openAtSource reads the name of a stream from a connection of the agent, and opens the stream to the target.
func (p *process) openAtSource(ctx context.Context, conn *net.UnixConn) (stream, error) {
	name, err := readLine(conn)
	if err != nil {
		return stream{}, err
	}
	remote, err := p.dialTarget(ctx, name)
	if err != nil {
		_, _ = fmt.Fprintf(conn, "%.*s\n", maxLine-2, oneLine(err))
		return stream{}, err
	}
	if _, err := io.WriteString(conn, accepted+"\n"); err != nil {
		return stream{}, errors.Join(err, remote.Close())
	}
	return stream{name: name, one: conn, other: remote}, nil
}

// dialTarget connects to the target's tunnel and requests a stream.
func (p *process) dialTarget(ctx context.Context, stream string) (*tls.Conn, error) {
	var dialer net.Dialer
	raw, err := dialer.DialContext(ctx, "tcp", p.Address)
	if err != nil {
		return nil, err
	}
	setUserTimeout(raw)
	conn := tls.Client(raw, p.tls)
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer := ""
	if err = conn.HandshakeContext(ctx); err == nil {
		if _, err = io.WriteString(conn, p.request(stream)+"\n"); err == nil {
			answer, err = readLine(conn)
		}
	}
	if err == nil && answer != accepted {
		err = errors.New(answer)
	}
	if err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	return conn, nil
}

// request returns the text with which the source requests a stream, without the newline.
func (p *process) request(stream string) string {
	return fmt.Sprintf("trivet-migration/1 %s %d %s", p.VM, p.Attempt, stream)
}

// openAtTarget verifies the source, calls verified, and connects the requested stream to QEMU unless it is a memory
// stream.
func (p *process) openAtTarget(ctx context.Context, raw net.Conn, verified func()) (stream, error) {
	setUserTimeout(raw)
	conn := tls.Server(raw, p.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		return stream{}, err
	}
	verified()
	line, err := readLine(conn)
	if err != nil {
		return stream{}, err
	}
	s, err := p.admit(ctx, line, conn)
	if err != nil {
		_, _ = fmt.Fprintf(conn, "%.*s\n", maxLine-2, oneLine(err))
		return stream{}, errors.Join(err, conn.Close())
	}
	if _, err := io.WriteString(conn, accepted+"\n"); err != nil {
		if s.other != nil {
			err = errors.Join(err, s.other.Close())
		}
		return stream{}, err
	}
	return s, nil
}

// admit returns the stream that the source has requested with line on conn. It connects a stream of a disk to QEMU. It
// returns an error if the stream was opened before. For a memory stream, admit closes an earlier connection on which no
// byte has arrived yet.
func (p *process) admit(ctx context.Context, line string, conn duplex) (stream, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	memory := memoryStreams(p.Channels)
	for i, name := range append(memory, p.Disks...) {
		if line != p.request(name) {
			continue
		}
		if p.open[name] {
			return stream{}, fmt.Errorf("stream %s was opened before", name)
		}
		if i < len(memory) {
			if earlier := p.waiting[name]; earlier != nil {
				_ = earlier.Close()
			}
			p.waiting[name] = conn
			return stream{name: name, memory: true, one: conn}, nil
		}
		p.open[name] = true
		local, err := dialUnix(ctx, p.Dir, DiskSocket)
		return stream{name: name, one: conn, other: local}, err
	}
	return stream{}, errors.New("this host expects no such stream: the migration attempt may have ended")
}

// awaitMemory waits for the first byte on a connection for a memory stream, and then marks the stream as opened. It
// returns a connection that first reads this byte and then reads from conn. It returns an error if conn ends before the
// first byte arrives, or if the source has requested the stream again on a later connection.
//
// The agent of the source may end after it has requested the stream and before it has passed the connection to QEMU.
// The target's QEMU must not read the end of this connection: it would exit, and the next agent of the source could not
// continue the migration.
func (p *process) awaitMemory(name string, conn duplex) (duplex, error) {
	first := make([]byte, 1)
	_, err := io.ReadFull(conn, first)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting[name] != conn {
		return nil, errors.Join(err, net.ErrClosed)
	}
	delete(p.waiting, name)
	if err != nil {
		return nil, err
	}
	p.open[name] = true
	return readAhead{duplex: conn, all: io.MultiReader(bytes.NewReader(first), conn)}, nil
}

// readAhead is a connection of which some data has been read already. Its field all reads this data first, and then from
// the connection.
type readAhead struct {
	duplex
	all io.Reader
}

func (r readAhead) Read(b []byte) (int, error) { return r.all.Read(b) }
