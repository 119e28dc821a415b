package resolver

import "log/slog"

var discardLog = slog.New(slog.DiscardHandler)
