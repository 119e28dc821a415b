package billing

import (
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Terms are by what a meter counts.
type Terms struct {
	Prices Prices
	// Hour is how long an hour is, in milliseconds.
	Hour int64
}

// Meter counts the hours of one VM. It is moved in the transaction that writes down the bills which that makes, so that
// an hour is billed once, by whoever comes to it first.
type Meter struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	VM      cloud.VMID
	Name    string
	// Use is what is paid for since the last change.
	Use Use
	// Until is the end of the last hour that was counted, and the beginning of the next one.
	Until cloud.Time
	// Peak is what was billed for the last hour that was counted: the dearest use that it has seen.
	Peak int64
	// Reservation holds credit for the first bill; then it is empty.
	Reservation string
	// Bills counts them. Last is where the record of the last one stands.
	Bills uint64
	Last  Place
}

// Place is where a bill's record stands among its VM's: it stays when the bill grows, or is paid in part.
type Place struct {
	From   cloud.Time
	Number uint64
}

// Bill is what is owed for some hours of one VM, one after the other and all of one price.
type Bill struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	VM      cloud.VMID
	Name    string
	// Number is by the meter's count.
	Number uint64
	// From is when the first of the hours began, Step how long each is, in milliseconds.
	From  cloud.Time
	Step  int64
	Hours int64
	// Price of each hour, for Use.
	Price int64
	Use   Use
	// More says that the hour was billed before, for less: this is the rest.
	More bool
	// Reservation, when set, holds credit for the first of the hours.
	Reservation string
}

// Pass counts every hour that has begun by now, at what is used since the last change; the bill is nil when none has, or
// when they cost nothing.
func (m *Meter) Pass(now cloud.Time, t Terms) *Bill {
	if now < m.Until {
		return nil
	}
	hours := (now-m.Until)/t.Hour + 1
	price := t.Prices.Hour(m.Use)
	from, billed := m.Until, hours
	if m.waits() && price > 0 {
		// It never ran in the hour that is over now.
		from, billed = from-t.Hour, billed+1
	}
	if !mutant.On(mutant.ChargeHourTwice) {
		m.Until += hours * t.Hour
	}
	m.Peak = price
	return m.bill(from, billed, price, false, t)
}

// waits says that nothing was billed yet for a VM that is off: the bill comes when it runs, or at the end of the hour, and
// has the reservation for itself.
func (m *Meter) waits() bool { return m.Reservation != "" && m.Use.VCPUs == 0 }

// Change counts up to now, and from now on what is used is something else. An hour costs what the dearest use in it
// costs: when that rises, the rest is billed at once.
func (m *Meter) Change(now cloud.Time, u Use, t Terms) []*Bill {
	var bills []*Bill
	add := func(b *Bill) {
		if b != nil {
			bills = append(bills, b)
		}
	}
	add(m.Pass(now, t))
	m.Use = u
	price, before := t.Prices.Hour(u), m.Peak
	if price > before && !m.waits() && !mutant.On(mutant.ForgetShortRuns) {
		m.Peak = price
		add(m.bill(m.Until-t.Hour, 1, price-before, before > 0, t))
	}
	return bills
}

// bill makes a bill, unless it would be for nothing. The first speaks for the reservation.
func (m *Meter) bill(from cloud.Time, hours, price int64, more bool, t Terms) *Bill {
	if price == 0 {
		return nil
	}
	m.Bills++
	b := &Bill{
		Org: m.Org, Project: m.Project, VM: m.VM, Name: m.Name, Number: m.Bills, From: from, Step: t.Hour, Hours: hours, Price: price,
		Use: m.Use, More: more, Reservation: m.Reservation,
	}
	m.Reservation = ""
	return b
}

// Join takes a bill for the hours right after this one's, at the same price, into it, and says whether it could. So what
// a VM owes for months is a few records.
func (b *Bill) Join(next *Bill) bool {
	if b.More || next.More || next.Reservation != "" || b.Price != next.Price || b.Use != next.Use || b.Step != next.Step ||
		b.From+b.Hours*b.Step != next.From {
		return false
	}
	b.Hours += next.Hours
	return true
}

// PayOne takes the first hour off a bill.
func (b *Bill) PayOne() {
	b.From += b.Step
	b.Hours--
	b.Reservation = ""
}

// Total is all that is owed, or the largest number there is when it is more.
func (b *Bill) Total() int64 {
	if b.Hours > 0 && b.Price > math.MaxInt64/b.Hours {
		return math.MaxInt64
	}
	return b.Price * b.Hours
}

// Says is what the tenant reads of the charge for the first of the hours.
func (b *Bill) Says() string {
	which := "hour"
	if b.More {
		which = "rest of the hour"
	}
	return fmt.Sprintf("VM %s, %s from %s: %s", b.Name, which, time.UnixMilli(b.From).UTC().Format(time.RFC3339), b.Use)
}

// ID is the id of something that belongs to the first of the hours: the same whoever charges it, and however often that
// is tried.
func (b *Bill) ID(what string) string {
	return idOf(b.VM, fmt.Sprintf("%d/%d/%s", b.From, b.Number, what))
}

// idOf makes an id of a VM's and a text.
func idOf(vm cloud.VMID, what string) string {
	return uuid.NewSHA1(uuid.NameSpaceOID, []byte("trivet/billing/"+string(vm)+"/"+what)).String()
}
