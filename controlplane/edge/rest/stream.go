package rest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Stream is a payload of `data` that is written piece by piece, as one JSON value. When it fails after something was sent
// the connection is cut, so that nobody takes a part for the whole.
type Stream func(w io.Writer) error

// Verbatim is an answer that another member made, envelope and all. It is written as it comes, and cut when it breaks off.
// The handler's Response has its status.
type Verbatim struct{ Body io.ReadCloser }

// chunkTime is how long a client may take to read a piece of a stream.
const chunkTime = 30 * time.Second

// chunkBytes of a stream are gathered before anything is sent: until then it can still fail with an answer of its own.
const chunkBytes = 64 << 10

// pieces is an answer that begins with its first write, and puts the deadline of the connection off with each.
type pieces struct {
	w       http.ResponseWriter
	control *http.ResponseController
	status  int
	began   bool
}

func (p *pieces) Write(b []byte) (int, error) {
	// A writer that knows no deadlines is that of a test.
	_ = p.control.SetWriteDeadline(time.Now().Add(chunkTime))
	if !p.began {
		p.began = true
		begin(p.w, p.status)
	}
	return p.w.Write(b)
}

// inPieces lets body write an answer. To HEAD it is not even asked for one.
func inPieces(w http.ResponseWriter, r *http.Request, status int, body func(io.Writer) error) (bool, error) {
	if r.Method == http.MethodHead {
		begin(w, status)
		return true, nil
	}
	p := &pieces{w: w, control: http.NewResponseController(w), status: status}
	out := bufio.NewWriterSize(p, chunkBytes)
	err := body(out)
	if err == nil {
		err = out.Flush()
	}
	return p.began, err
}

func stream(w http.ResponseWriter, r *http.Request, status int, data Stream, id string) (bool, error) {
	return inPieces(w, r, status, func(out io.Writer) error {
		meta, err := json.Marshal(metaOf(id))
		if err != nil {
			return err
		}
		if _, err := io.WriteString(out, `{"data":`); err != nil {
			return err
		}
		if err := data(out); err != nil {
			return err
		}
		_, err = fmt.Fprintf(out, ",\"meta\":%s}\n", meta)
		return err
	})
}

func verbatim(w http.ResponseWriter, r *http.Request, status int, data Verbatim) (bool, error) {
	defer data.Body.Close()
	return inPieces(w, r, status, func(out io.Writer) error {
		_, err := io.Copy(out, data.Body)
		return err
	})
}
