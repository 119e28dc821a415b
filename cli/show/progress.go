package show

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
)

// Progress is a status line that is shown on a terminal during a long wait, from its first second on.
type Progress struct {
	w     io.Writer
	timer *time.Timer

	mu    sync.Mutex
	text  string
	ended bool
	line  *progressbar.ProgressBar // nil until it is shown
}

// progressPause is the time until the status line is shown, so that it does not flicker for short calls.
const progressPause = time.Second

// Start begins to show text as a status line on w, or nothing if w is nil. The caller must call End before it prints
// anything else.
func Start(w io.Writer, text string) *Progress {
	p := &Progress{w: w, text: text}
	if w != nil {
		p.timer = time.AfterFunc(progressPause, p.show)
	}
	return p
}

func (p *Progress) show() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.line = progressbar.NewOptions(-1, progressbar.OptionSetWriter(p.w), progressbar.OptionSetDescription(Text(p.text)),
		progressbar.OptionSpinnerType(spinner), progressbar.OptionUseANSICodes(true), progressbar.OptionClearOnFinish())
	// An error is ignored here and below: if the terminal is closed, the command's own output fails too.
	_ = p.line.RenderBlank()
}

// spinner is the number of a spinner of package progressbar with one character.
const spinner = 9

// Say replaces the text of the status line.
func (p *Progress) Say(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = text
	if p.line != nil {
		p.line.Describe(Text(text))
	}
}

// End removes the status line from the terminal.
func (p *Progress) End() {
	if p.timer == nil {
		return
	}
	p.timer.Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	if p.line != nil {
		_ = p.line.Finish()
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
