package explain

import "google.golang.org/grpc/codes"

// Exit codes of the program. A command whose exit code is a result, such as `trivet vm exec`, has others.
const (
	ExitFailed      = 1
	ExitUsage       = 2
	ExitNotFound    = 3
	ExitExists      = 4
	ExitRefused     = 5
	ExitUnreachable = 6
	ExitTimeout     = 7
	ExitInterrupted = 130
)

// exits maps codes to exit codes. All other codes, and Failed, have ExitFailed.
var exits = map[codes.Code]int{
	codes.InvalidArgument:    ExitUsage,
	codes.NotFound:           ExitNotFound,
	codes.AlreadyExists:      ExitExists,
	codes.Unauthenticated:    ExitRefused,
	codes.PermissionDenied:   ExitRefused,
	codes.FailedPrecondition: ExitRefused,
	codes.ResourceExhausted:  ExitRefused,
	codes.Unavailable:        ExitUnreachable,
	codes.DeadlineExceeded:   ExitTimeout,
	codes.Canceled:           ExitInterrupted,
}

func exitCode(c codes.Code) int {
	if n, ok := exits[c]; ok {
		return n
	}
	return ExitFailed
}
