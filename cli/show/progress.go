package show

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Progress is one line on a terminal that says what is being waited for, shown once it takes longer than a second.
type Progress struct {
	w     io.Writer
	start time.Time
	stop  chan struct{}
	done  chan struct{}

	mu   sync.Mutex
	text string
}

// Start begins to wait. A nil w shows nothing. End it before anything else is printed.
func Start(w io.Writer, text string) *Progress {
	p := &Progress{w: w, text: text, start: time.Now(), stop: make(chan struct{}), done: make(chan struct{})}
	if w == nil {
		close(p.done)
		return p
	}
	go p.run()
	return p
}

// Say changes the text.
func (p *Progress) Say(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = text
}

// End takes the line away and waits for the last write.
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
			// A terminal that is gone is found by whatever is printed next.
			_, _ = fmt.Fprintf(p.w, "\r\x1b[K%s ... %ds", Text(text), time.Since(p.start).Round(time.Second)/time.Second)
		}
	}
}
