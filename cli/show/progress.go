package show

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// Progress is a status line that is shown on a terminal during a long wait, from its first second on.
type Progress struct {
	w     io.Writer
	start time.Time
	stop  chan struct{}
	done  chan struct{}

	mu   sync.Mutex
	text string
}

// Start begins to show text as a status line on w, or nothing if w is nil. The caller must call End before it prints
// anything else.
func Start(w io.Writer, text string) *Progress {
	p := &Progress{w: w, text: text, start: time.Now(), stop: make(chan struct{}), done: make(chan struct{})}
	if w == nil {
		close(p.done)
		return p
	}
	go p.run()
	return p
}

// Say replaces the text of the status line.
func (p *Progress) Say(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = text
}

// End removes the status line from the terminal.
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
			// An error is ignored here: if the terminal is closed, the command's own output fails too.
			_, _ = fmt.Fprintf(p.w, "\r\x1b[K%s ... %ds", Text(text), time.Since(p.start).Round(time.Second)/time.Second)
		}
	}
}

// barWidth is the number of characters of the bar that Bar draws.
const barWidth = 24

// Bar returns a progress bar such as "[######            ] 25 % of 100 MiB". If total is 0, the end is unknown, and Bar
// returns only the number of bytes done.
func Bar(done, total int64) string {
	if total <= 0 {
		return Bytes(uint64(done))
	}
	full := int(min(done, total) * barWidth / total)
	return fmt.Sprintf("[%s%s] %d %% of %s", strings.Repeat("#", full), strings.Repeat(" ", barWidth-full), min(done, total)*100/total, Bytes(uint64(total)))
}
