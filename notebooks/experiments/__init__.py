"""What single notebooks measure and draw: experiments on top of the package, which never imports
them.
"""
