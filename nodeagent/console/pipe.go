package console

import "context"

// Pipe is the end of the user of a console. One goroutine may call Recv while another one calls Send.
type Pipe interface {
	// Recv returns the next bytes of the user. It returns io.EOF after the last ones, and the error of ctx if ctx ends
	// first.
	Recv(ctx context.Context) ([]byte, error)
	// Send sends bytes to the user, and blocks while the user does not read. For a serial port, offset is the offset in
	// the port's log of the first byte after data. Otherwise it is 0.
	Send(data []byte, offset int64) error
}

// Refusal explains to a user why a console cannot be opened or was closed.
type Refusal struct {
	// Reason is a word for programs, such as CONSOLE_IN_USE, or empty.
	Reason string
	Text   string
}

func (r *Refusal) Error() string { return r.Text }
