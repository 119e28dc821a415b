package qmp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	goqemu "github.com/digitalocean/go-qemu/qmp"
)

// With returns the connection as go-qemu's Monitor, for the typed commands of its package raw:
//
//	status, err := raw.NewMonitor(conn.With(ctx)).QueryStatus()
//
// Each command ends with ctx, or after [DefaultTimeout] if ctx has no deadline. Its errors are those of [Conn.Do]; an
// error of another kind means that go-qemu could not decode QEMU's reply.
func (c *Conn) With(ctx context.Context) goqemu.Monitor { return contextMonitor{ctx: ctx, conn: c} }

// contextMonitor implements go-qemu's Monitor on a connection, for the commands of one context.
type contextMonitor struct {
	ctx  context.Context
	conn *Conn
}

// Connect returns an error if the connection has ended.
func (m contextMonitor) Connect() error { return m.conn.Err() }

// Disconnect closes the connection.
func (m contextMonitor) Disconnect() error { return m.conn.Close() }

// Events returns goqemu.ErrEventsNotSupported: its channel cannot report dropped events. Use [Conn.Subscribe].
func (m contextMonitor) Events(context.Context) (<-chan goqemu.Event, error) {
	return nil, goqemu.ErrEventsNotSupported
}

// Run sends the command {"execute": …, "arguments": …} and returns the result in QEMU's reply as {"return": …}.
func (m contextMonitor) Run(command []byte) ([]byte, error) {
	var in struct {
		Execute   string          `json:"execute"`
		Arguments json.RawMessage `json:"arguments"`
	}
	d := json.NewDecoder(bytes.NewReader(command))
	d.DisallowUnknownFields() // An id or exec-oob would be ignored silently.
	if err := d.Decode(&in); err != nil {
		return nil, fmt.Errorf("read command: %w", err)
	}
	if d.More() || in.Execute == "" {
		return nil, errors.New("read command: want one object with execute")
	}
	var out struct {
		Return json.RawMessage `json:"return"`
	}
	if err := m.conn.Do(m.ctx, in.Execute, in.Arguments, &out.Return); err != nil {
		return nil, err
	}
	return json.Marshal(out)
}
