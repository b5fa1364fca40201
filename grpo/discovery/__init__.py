"""Scientific discovery: programs that construct kissing configurations, verified exactly."""
