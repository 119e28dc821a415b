package show

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Progress is a status line on a terminal for a long wait. It appears after one second.
type Progress struct {
	w     io.Writer
	start time.Time
	stop  chan struct{}
	done  chan struct{}

	mu   sync.Mutex
	text string
}

// Start starts a status line on w; a nil w shows nothing. Call End before printing anything else.
func Start(w io.Writer, text string) *Progress {
	p := &Progress{w: w, text: text, start: time.Now(), stop: make(chan struct{}), done: make(chan struct{})}
	if w == nil {
		close(p.done)
		return p
	}
	go p.run()
	return p
}

// Say replaces the text.
func (p *Progress) Say(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = text
}

// End removes the line and waits for the last write.
func (p *Progress) End() {
	close(p.stop)
	<-p.done
}

func (p *Progress) run() {
	defer close(p.done)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	shown := false
	for {
		select {
		case <-p.stop:
			if shown {
				_, _ = io.WriteString(p.w, "\r\x1b[K")
			}
			return
		case <-tick.C:
			p.mu.Lock()
			text := p.text
			p.mu.Unlock()
			shown = true
			// If the terminal is gone, the next output reports the error.
			_, _ = fmt.Fprintf(p.w, "\r\x1b[K%s ... %ds", Text(text), time.Since(p.start).Round(time.Second)/time.Second)
		}
	}
}
