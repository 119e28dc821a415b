package leader

import (
	"context"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Mode determines whether Command.Call may send a command to a leader again after the response was lost.
type Mode uint8

const (
	// Once: Call never sends the command again. After a lost response the caller gets a fault of kind Unavailable,
	// because the outcome is unknown.
	Once Mode = iota
	// Repeatable: Call sends the command again. This is safe because running the command twice has the same effect as
	// running it once.
	Repeatable
	// Keyed is the same as Repeatable if the caller gave an idempotency key, and the same as Once if not. The command
	// stores its response under the key (store.Idempotent), so that a repeated request returns the first response.
	Keyed
)

// repeatable reports whether the caller's command may be sent again after its response was lost.
func (m Mode) repeatable(caller *cloud.Caller) bool {
	if mutant.On(mutant.RepeatUnkeyed) {
		return true
	}
	return m == Repeatable || m == Keyed && caller != nil && caller.IdempotencyKey != ""
}

// Command is an operation of a service of type S. Every member may call it, and the leader of the raft group named
// system runs it. Q is the type of the request, A that of the response; both are encoded as CBOR between members.
type Command[S, Q, A any] struct {
	name string
	mode Mode
	run  func(S, context.Context, Q) (A, error)
}

// NewCommand returns a command. When the command is called, the leader runs it with the function run. run is usually a
// method expression, such as (*Service).createOnLeader. The command must be passed to Register before it is called.
func NewCommand[S, Q, A any](name string, mode Mode, run func(S, context.Context, Q) (A, error)) *Command[S, Q, A] {
	return &Command[S, Q, A]{name, mode, run}
}

// Call runs the command on the leader, which may be any member, and returns the command's response. The package comment
// describes the errors that Call returns if there is no leader or the leader is lost.
func (cmd *Command[S, Q, A]) Call(ctx context.Context, c *Commands, q Q) (a A, err error) {
	run, ok := c.local[cmd.name].(func(context.Context, Q) (A, error))
	if !ok {
		return a, notRegistered(cmd.name)
	}
	err = c.route(ctx, cmd.mode, func(ctx context.Context, leader uint64) error {
		if leader == c.self {
			a, err = run(ctx, q)
			return err
		}
		body, err := cbor.Marshal(q)
		if err != nil {
			return fmt.Errorf("encode %s: %w", cmd.name, err)
		}
		answer, err := c.peers.Call(ctx, leader, cmd.name, body, auth.CallerOf(ctx))
		if err != nil {
			return err
		}
		return cbor.Unmarshal(answer, &a)
	})
	return a, err
}

func (cmd *Command[S, Q, A]) register(c *Commands, s S) {
	run := func(ctx context.Context, q Q) (a A, err error) {
		if c.gate != nil {
			if err := c.gate(ctx); err != nil {
				return a, err
			}
		}
		return cmd.run(s, ctx, q)
	}
	c.add(cmd.name, run)
	c.served[cmd.name] = func(ctx context.Context, body []byte) ([]byte, error) {
		var q Q
		if err := cbor.Unmarshal(body, &q); err != nil {
			return nil, fmt.Errorf("decode %s: %w", cmd.name, err)
		}
		a, err := run(ctx, q)
		if err != nil {
			return nil, err
		}
		return cbor.Marshal(a)
	}
}

// Commands holds the registered commands of one member. Register all commands before serving.
type Commands struct {
	self       uint64
	leadership Leadership
	peers      Caller
	gate       Gate

	// local holds, by command name, the typed function that runs a command or stream on this member.
	local map[string]any
	// served, streamed and exchanged hold the same functions as local, for calls of other members. They take the request and
	// return the response as CBOR.
	served    map[string]func(ctx context.Context, body []byte) ([]byte, error)
	streamed  map[string]func(ctx context.Context, body []byte, send func([]byte) error) error
	exchanged map[string]func(ctx context.Context, body []byte, pipe Pipe) error
}

// NewCommands returns a Commands for the member with the ID self, without any registered command. peers may be nil in a
// cluster of one member.
func NewCommands(self uint64, leadership Leadership, peers Caller) *Commands {
	return &Commands{
		self: self, leadership: leadership, peers: peers, local: map[string]any{},
		served:    map[string]func(context.Context, []byte) ([]byte, error){},
		streamed:  map[string]func(context.Context, []byte, func([]byte) error) error{},
		exchanged: map[string]func(context.Context, []byte, Pipe) error{},
	}
}

// CommandOf is implemented by Command, Stream and Exchange for services of type S.
type CommandOf[S any] interface {
	register(c *Commands, s S)
}

// Register makes the commands of the service s callable on this member, and lets this member run them while it leads.
// It panics if a command of the same name is already registered.
func Register[S any](c *Commands, s S, list ...CommandOf[S]) {
	for _, command := range list {
		command.register(c, s)
	}
}

func (c *Commands) add(name string, run any) {
	if _, ok := c.local[name]; ok {
		panic("command " + name + " is registered twice")
	}
	c.local[name] = run
}

// notRegistered returns the error of a call to a command that was not passed to Register, which is a programming error.
func notRegistered(name string) error {
	return fmt.Errorf("command %s is not registered", name)
}

// Gate is a check that the leader makes before it runs a command, for the caller in the context. If it returns an
// error, the command does not run and the caller gets the error, which is a *fault.Fault. A Gate must not block.
type Gate func(ctx context.Context) error

// SetGate makes the leader call g before each command, including commands that another member forwarded. Call SetGate
// before serving. The gate does not apply to streams and exchanges, because they only read.
func (c *Commands) SetGate(g Gate) { c.gate = g }

// Serve runs a command that another member forwarded to this one. If this member does not lead, Serve returns
// ErrNotLeader and does not forward the command further.
func (c *Commands) Serve(ctx context.Context, name string, body []byte, caller *cloud.Caller) ([]byte, error) {
	f, ok := c.served[name]
	if !ok {
		return nil, fault.New(fault.Unimplemented, "this member knows no command %s", name)
	}
	ctx, err := c.serving(ctx, caller)
	if err != nil {
		return nil, err
	}
	return f(ctx, body)
}

// serving returns ctx with the caller of a forwarded command, whom the forwarding member has authenticated. It returns
// ErrNotLeader if this member does not lead.
func (c *Commands) serving(ctx context.Context, caller *cloud.Caller) (context.Context, error) {
	if leader, _ := c.leadership.Leader(); leader != c.self {
		return ctx, ErrNotLeader
	}
	if caller != nil {
		ctx = auth.With(ctx, caller, auth.RPC)
	}
	return ctx, nil
}

func (c *Commands) route(ctx context.Context, mode Mode, attempt func(ctx context.Context, leader uint64) error) error {
	return Route(ctx, c.leadership, c.self, mode.repeatable(auth.CallerOf(ctx)), attempt)
}
